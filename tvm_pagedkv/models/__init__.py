# SPDX-License-Identifier: Apache-2.0
"""Decoders of the Llama family from Hugging Face directories."""

from .config import LlamaConfig
from .model import LlamaModel
from .parallel import ParallelLlama

__all__ = ["LlamaConfig", "LlamaModel", "ParallelLlama"]
