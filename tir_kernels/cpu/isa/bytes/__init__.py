# SPDX-License-Identifier: Apache-2.0
"""Products and shuffles of bytes and of 16-bit words."""
