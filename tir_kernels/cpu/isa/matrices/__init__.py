# SPDX-License-Identifier: Apache-2.0
"""Products of small matrices, in vector registers and in the tiles of AMX."""
