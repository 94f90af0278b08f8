# SPDX-License-Identifier: Apache-2.0
"""Kernels that move rows: append, copy, merge, sink logits. Written once for all targets."""
