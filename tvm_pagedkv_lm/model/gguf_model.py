# SPDX-License-Identifier: Apache-2.0
"""`GgufModel`: a GGUF file as the source of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..blocks.moe import MixtureOfExperts
from ..config.decoder_config import DecoderConfig
from ..config.part import LayerPart
from ..families.gguf_fields import config_fields, gguf_family, num_extra_layers
from ..families.registry import config_from_fields, with_eos
from ..gguf.experts import NAMES
from ..gguf.file import GgufFile
from ..gguf.metadata import Metadata
from ..gguf.special_tokens import end_tokens, named_tokens
from ..gguf.tensors import GgufTensors
from ..gguf.tokenizer import build_tokenizer
from ..text.chat import ChatTemplate
from ..text.sampling_defaults import sampling_defaults
from ..weights.content_digest import content_digest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# general.sampling.* -> fields of generation_config.json
_SAMPLING = {
    "temp": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "penalty_repeat": ("repetition_penalty", float),
}


class GgufModel:
    """A GGUF file, which has everything in one: configuration, weights, tokenizer and template.

    Parameters
    ----------
    path : path
    generation : mapping
        Fields of a ``generation_config.json``, which take precedence over those of the file.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no such file, or it is not a model that is supported; the message names the key.
    """

    def __init__(self, path: str | Path, generation: Mapping[str, Any] | None = None):
        self.path = Path(path)
        self._file = GgufFile(self.path)
        self._metadata = Metadata(self._file.metadata, str(self.path))
        self._generation = dict(generation or {})
        shapes = {name: info.shape for name, info in self._file.tensors.items()}
        try:
            fields = config_fields(self._metadata, shapes, self._file.read)
            fields["eos_token_id"] = end_tokens(self._metadata)
            config = with_eos(config_from_fields(fields), self._generation)
        except (ValueError, TypeError) as error:
            text = str(error)
            where = "" if text.startswith(str(self.path)) else f"{self.path}: "
            raise ValueError(f"{where}{text}") from None
        config = config.map(_with_names)
        self._tensors = GgufTensors(
            self._file,
            gguf_family(self._metadata),
            config.num_heads,
            config.num_kv_heads,
            config.num_layers,
            num_extra_layers(self._metadata),
        )
        self._config = replace(config, dtype=self._tensors.dtype())

    def config(self) -> DecoderConfig:
        """Return the configuration."""
        return self._config

    def tensors(self) -> GgufTensors:
        """Return the reader of the weights."""
        return self._tensors

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises
        ------
        ValueError
            If its kind is not supported, or it is damaged.
        """
        try:
            return build_tokenizer(self._metadata)
        except Exception as error:  # tokenizers raises bare Exception
            text = str(error)
            where = "" if text.startswith(str(self.path)) else f"{self.path}: "
            raise ValueError(f"{where}{text}") from None

    def end_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return nothing: the configuration has the ends that the file names."""
        return ()

    def chat_template(self) -> ChatTemplate | None:
        """Return the chat template; None if the file has none."""
        source = self._metadata.get("tokenizer.chat_template", str, None)
        if source is None:
            return None
        where = f"{self.path}: tokenizer.chat_template"
        return ChatTemplate(source, named_tokens(self._metadata), where)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that the model's makers recommend."""
        found = {
            ours: self._metadata.get(f"general.sampling.{theirs}", kind, None)
            for theirs, (ours, kind) in _SAMPLING.items()
        }
        return sampling_defaults(found | self._generation, str(self.path))

    def fingerprint(self) -> str:
        """Return a name for all that a text depends on: by the header's keys and the weights."""
        digest = hashlib.sha256(self.content_digest().encode())
        digest.update(repr(self._file.metadata).encode())
        return digest.hexdigest()

    def content_digest(self) -> str:
        """Return a name for the weights, which copies on other machines have as well."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return content_digest({self.path: [info.begin for info in self._file.tensors.values()]})


def _with_names(part: LayerPart) -> LayerPart:
    """Return a part with the names of experts that all files have alike."""
    if not isinstance(part, MixtureOfExperts):
        return part
    return replace(part, experts=replace(part.experts, names=NAMES))
