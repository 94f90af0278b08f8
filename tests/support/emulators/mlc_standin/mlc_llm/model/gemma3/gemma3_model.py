# SPDX-License-Identifier: Apache-2.0
"""Gemma 3: the window of the local layers is taken for one of the sequences."""

import dataclasses

from ...support.config import ConfigBase


@dataclasses.dataclass
class Gemma3TextConfig(ConfigBase):
    sliding_window_size: int | None = None
    sliding_window_pattern = 6
    kwargs: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.sliding_window_size is None:
            self.sliding_window_size = self.kwargs.get("sliding_window")


@dataclasses.dataclass
class Gemma3Config(ConfigBase):
    text_config: Gemma3TextConfig | None = None
    sliding_window_size: int = -1
    kwargs: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.text_config is None:
            self.text_config = Gemma3TextConfig.from_dict(self.kwargs)
        if self.sliding_window_size <= 0:
            self.sliding_window_size = self.text_config.sliding_window_size
