# SPDX-License-Identifier: Apache-2.0
"""From a configuration and a target to compiled kernels, kept on disk."""
