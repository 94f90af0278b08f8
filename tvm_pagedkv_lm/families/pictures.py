# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with an encoder of pictures, which are read as their text models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from ..config.decoder_config import DecoderConfig
from ..config.fields import text_model

_PREFIX = "model.language_model"  # of the text model's tensors
_OLDER = "language_model."  # in front of all names of a text model


def with_pictures(**readers: Callable[..., DecoderConfig]) -> Callable[..., DecoderConfig]:
    """Return a reader of the text model out of the fields of a whole model.

    Parameters
    ----------
    **readers : function
        The reader of each ``model_type`` that the text model may have; the first one also serves
        where the file names none.
    """

    def read_text(fields: Mapping[str, Any]) -> DecoderConfig:
        text = text_model(fields)
        model_type = text.get("model_type", next(iter(readers)))
        if model_type not in readers:
            raise ValueError(
                f"a text model of model_type {model_type!r} is not supported; expected "
                f"{' or '.join(readers)}"
            )
        config = readers[model_type](text)
        return replace(config, names=replace(config.names, model=_PREFIX))

    return read_text


def as_stored(config: DecoderConfig, stored: Collection[str]) -> DecoderConfig:
    """Return a configuration that fits the tensors of a checkpoint.

    In some, all of the text model is in ``language_model``; in others, ``language_model`` is in the
    part that has the layers. Of ``tie_word_embeddings`` there are two, which may differ, so the
    embedding serves where there is no matrix for the logits. Text models in files of their own stay
    as they are.

    Parameters
    ----------
    config : DecoderConfig
    stored : collection of str
        Names of the tensors.
    """
    names, older = config.names, f"{_OLDER}model"
    if names.model != _PREFIX:
        return config
    if any(name.startswith(f"{older}.") for name in stored):
        names = replace(names, model=older, lm_head=f"{_OLDER}{names.lm_head}")
    is_tied = f"{names.lm_head}.weight" not in stored
    return replace(config, names=names, tied_embeddings=is_tied)
