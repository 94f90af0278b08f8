# SPDX-License-Identifier: Apache-2.0
"""Language models on the cache of `tvm_pagedkv`: checkpoints, generation, and the command line.

A name is imported when it is first used, so that the command line answers ``--help`` before it
loads TVM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.decoder_config import DecoderConfig
    from .engine.conversation import ContextFullError, Conversation
    from .engine.disaggregated import RemotePrefill, serve_prefill
    from .engine.engine import generate
    from .engine.events import FinishedEvent, Statistics, TextEvent
    from .engine.parameters import SamplingParams, Window
    from .engine.session import load_session, save_session
    from .families.registry import config_from_directory, config_from_fields
    from .model.export import export_model
    from .model.hub import find_model
    from .model.included import SMOLLM2, download_smollm2, find_included
    from .model.model import DecoderModel
    from .model.source import fingerprint
    from .model.work import Work
    from .parallel.parallel import ParallelModel
    from .text.chat_prompt import encode_chat
    from .text.plain_messages import plain_tokenizer
    from .text.tokens import check_tokens, encode_text

_MODULES = {
    "DecoderConfig": ".config.decoder_config",
    "ContextFullError": ".engine.conversation",
    "Conversation": ".engine.conversation",
    "RemotePrefill": ".engine.disaggregated",
    "serve_prefill": ".engine.disaggregated",
    "generate": ".engine.engine",
    "FinishedEvent": ".engine.events",
    "Statistics": ".engine.events",
    "TextEvent": ".engine.events",
    "SamplingParams": ".engine.parameters",
    "Window": ".engine.parameters",
    "load_session": ".engine.session",
    "save_session": ".engine.session",
    "config_from_directory": ".families.registry",
    "config_from_fields": ".families.registry",
    "export_model": ".model.export",
    "find_model": ".model.hub",
    "SMOLLM2": ".model.included",
    "download_smollm2": ".model.included",
    "find_included": ".model.included",
    "DecoderModel": ".model.model",
    "fingerprint": ".model.source",
    "Work": ".model.work",
    "ParallelModel": ".parallel.parallel",
    "encode_chat": ".text.chat_prompt",
    "plain_tokenizer": ".text.plain_messages",
    "check_tokens": ".text.tokens",
    "encode_text": ".text.tokens",
}

__all__ = [
    "ContextFullError",
    "Conversation",
    "DecoderConfig",
    "DecoderModel",
    "FinishedEvent",
    "ParallelModel",
    "RemotePrefill",
    "SMOLLM2",
    "SamplingParams",
    "Statistics",
    "TextEvent",
    "Window",
    "Work",
    "check_tokens",
    "config_from_directory",
    "config_from_fields",
    "download_smollm2",
    "encode_chat",
    "encode_text",
    "export_model",
    "find_included",
    "find_model",
    "fingerprint",
    "generate",
    "load_session",
    "plain_tokenizer",
    "save_session",
    "serve_prefill",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
