# SPDX-License-Identifier: Apache-2.0
"""`Family`: a line of the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..config.decoder_config import DecoderConfig
from ..gguf.family import GgufFamily

Reader = Callable[[Mapping[str, Any]], DecoderConfig]


@dataclass(frozen=True)
class Family:
    """A family of models, by its architecture.

    Its chat template and its tokenizer come with each checkpoint.

    Parameters
    ----------
    architecture, model_type : str
        What ``config.json`` calls it.
    read : function
        Returns a `DecoderConfig`, with the names of tensors, from the fields of ``config.json``.
    gguf : GgufFamily, optional
        Keys and tensors of its GGUF files; None: they are not read, or as those of a sibling.
    quantization : str, optional
        The ``quant_method`` of checkpoints whose quantized weights are read.
    """

    architecture: str
    model_type: str
    read: Reader
    gguf: GgufFamily | None = None
    quantization: str | None = None
