# SPDX-License-Identifier: Apache-2.0
"""Models that run on several workers."""
