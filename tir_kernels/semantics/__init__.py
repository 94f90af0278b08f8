# SPDX-License-Identifier: Apache-2.0
"""Semantics of the kernels, free of target code: visibility, RoPE, softmax, partial states."""
