# SPDX-License-Identifier: Apache-2.0
"""Batched text generation: sampling, speculative decoding, disaggregated prefill."""

from .disaggregated import RemotePrefill, serve_prefill
from .engine import generate
from .events import FinishedEvent, Statistics, TextEvent
from .parameters import SamplingParams, Window

__all__ = [
    "FinishedEvent",
    "RemotePrefill",
    "SamplingParams",
    "Statistics",
    "TextEvent",
    "Window",
    "generate",
    "serve_prefill",
]
