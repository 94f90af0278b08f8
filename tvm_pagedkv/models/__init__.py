# SPDX-License-Identifier: Apache-2.0
"""Decoders from Hugging Face directories: Llama, Qwen, Gemma, Phi, OLMo."""

from .config import DecoderConfig
from .model import DecoderModel
from .parallel import ParallelModel

# Their names while Llama was the only family.
LlamaConfig, LlamaModel, ParallelLlama = DecoderConfig, DecoderModel, ParallelModel

__all__ = [
    "DecoderConfig",
    "DecoderModel",
    "LlamaConfig",
    "LlamaModel",
    "ParallelLlama",
    "ParallelModel",
]
