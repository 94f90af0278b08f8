# SPDX-License-Identifier: Apache-2.0
"""The format of GGUF files: keys, tensors and tokenizers, and what a family says about its own."""
