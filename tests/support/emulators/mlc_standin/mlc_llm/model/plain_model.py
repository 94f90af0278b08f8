# SPDX-License-Identifier: Apache-2.0
"""A family without anything special."""

import dataclasses

from ..support.config import ConfigBase


@dataclasses.dataclass
class PlainConfig(ConfigBase):
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    context_window_size: int = 0
    kwargs: dict = dataclasses.field(default_factory=dict)
