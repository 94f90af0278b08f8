# SPDX-License-Identifier: Apache-2.0
"""Tensors of checkpoints, and the weights that a decoder makes of them."""
