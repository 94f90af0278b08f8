# SPDX-License-Identifier: Apache-2.0
"""What the kernels compute, free of target code: visibility, RoPE, softmax, partial states."""
