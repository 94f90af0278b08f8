# SPDX-License-Identifier: Apache-2.0
"""How quantized weights are kept: formats, and matrices in them."""
