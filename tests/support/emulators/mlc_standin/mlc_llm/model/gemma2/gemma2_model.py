# SPDX-License-Identifier: Apache-2.0
"""Gemma 2: the context is cut to the window of the local layers."""

import dataclasses

from ...support.config import ConfigBase


@dataclasses.dataclass
class Gemma2Config(ConfigBase):
    context_window_size: int = 0
    attn_logit_softcapping: float | None = None
    sliding_window: int | None = None
    kwargs: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.context_window_size = self.sliding_window
