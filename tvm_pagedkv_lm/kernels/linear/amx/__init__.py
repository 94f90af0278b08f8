# SPDX-License-Identifier: Apache-2.0
"""Products of many rows in the tiles of AMX; `linear.products` chooses them."""
