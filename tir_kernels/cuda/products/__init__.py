# SPDX-License-Identifier: Apache-2.0
"""Products of tiles on tensor cores."""
