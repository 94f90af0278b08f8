# SPDX-License-Identifier: Apache-2.0
"""Batched text generation: sampling, speculative decoding, disaggregated prefill."""

from .conversation import ContextFullError, Conversation
from .disaggregated import RemotePrefill, serve_prefill
from .engine import generate
from .events import FinishedEvent, Statistics, TextEvent
from .parameters import SamplingParams, Window
from .session import load_session, save_session

__all__ = [
    "ContextFullError",
    "Conversation",
    "FinishedEvent",
    "RemotePrefill",
    "SamplingParams",
    "Statistics",
    "TextEvent",
    "Window",
    "generate",
    "load_session",
    "save_session",
    "serve_prefill",
]
