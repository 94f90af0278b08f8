# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights, quantized or not."""
