# SPDX-License-Identifier: Apache-2.0
"""Where K and V lie in pages, and the numbers that their bits stand for."""
