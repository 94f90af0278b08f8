# SPDX-License-Identifier: Apache-2.0
"""Instructions of AArch64."""
