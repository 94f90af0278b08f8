# SPDX-License-Identifier: Apache-2.0
"""Language models from Hugging Face directories and GGUF files.

Dense decoders, mixtures of experts, models with latent attention and hybrids.
"""

from .chat_prompt import encode_chat
from .config import DecoderConfig
from .export import export_model
from .hub import find_model
from .included import SMOLLM2
from .included import download as download_smollm2
from .included import find as find_included
from .model import DecoderModel
from .parallel import ParallelModel
from .plain_messages import plain_tokenizer
from .registry import config_from_directory, config_from_fields
from .source import fingerprint
from .tokens import check_tokens, encode_text
from .work import Work

__all__ = [
    "DecoderConfig",
    "DecoderModel",
    "ParallelModel",
    "SMOLLM2",
    "Work",
    "check_tokens",
    "encode_text",
    "config_from_directory",
    "config_from_fields",
    "download_smollm2",
    "encode_chat",
    "export_model",
    "find_included",
    "find_model",
    "fingerprint",
    "plain_tokenizer",
]
