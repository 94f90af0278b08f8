# SPDX-License-Identifier: Apache-2.0
"""Static scales of K and V in a checkpoint that was calibrated for pages of 8 bits."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tvm_pagedkv.config import MHA_KINDS, LayerSpec, check_choice

from ..config.decoder_config import DecoderConfig
from ..config.options import LayerScales
from .tensors import Tensors

CHOICES = ("row", "checkpoint")
# One tensor for a head, or for all: of compressed-tensors (now and as it began), vLLM and ModelOpt.
_OF_KV = re.compile(r"(?:attn\.|[kv]_proj\.)?(k|v|kv)_scale|(k|v)_proj\.output_scale")


def layer_scales(
    config: DecoderConfig,
    tensors: Tensors,
    choice: str,
    kv_dtype: str | tuple[str, str] | None = None,
) -> LayerScales:
    """Return the scales of K and of V of each layer that keeps them; empty for scales of rows.

    Parameters
    ----------
    config : DecoderConfig
    tensors : Tensors
        Of the checkpoint.
    choice : {"row", "checkpoint"}
    kv_dtype : str or (str, str), optional
        Of the pages.

    Raises
    ------
    ValueError
        If the checkpoint lacks a scale of a layer, has two, or one that is no positive number. If
        it was calibrated for another `kv_dtype`, whose largest code is another one.
    """
    check_choice("kv_scales", choice, CHOICES)
    if choice == "row":
        return ()
    _check_type(config.calibrated_for, tensors, kv_dtype)
    names = _scale_names(config, tensors)
    specs = [layer.cache_layers[0] for layer in config.layers]
    layers = [i for i, spec in enumerate(specs) if spec.kind in MHA_KINDS]
    if not any((i, letter) in names for i in layers for letter in "kv"):
        raise ValueError(
            f"{tensors.path} has no static scales of K and V, such as {config.names.model}.layers."
            "0.self_attn.k_scale; leave kv_scales 'row'"
        )
    found: list[tuple[int, Any]] = []
    for i in layers:
        missing = [letter for letter in "kv" if (i, letter) not in names]
        if missing:
            raise ValueError(f"{tensors.path} lacks {missing[0]}_scale of layer {i}")
        num_heads = specs[i].num_kv_heads or config.num_kv_heads
        scales = tuple(_read(tensors, names[i, letter], num_heads) for letter in "kv")
        try:
            found.append((i, LayerSpec(kv_scales=scales).kv_scales))
        except ValueError as error:
            raise ValueError(f"{tensors.path}, layer {i}: {error}") from None
    return tuple(found)


def _check_type(calibrated_for: str | None, tensors: Tensors, kv_dtype) -> None:
    if calibrated_for is None or kv_dtype is None:
        return
    for name in kv_dtype.split(",") if isinstance(kv_dtype, str) else kv_dtype:
        if name != calibrated_for:
            raise ValueError(
                f"the static scales of {tensors.path} are for kv_dtype {calibrated_for!r}, got "
                f"{name!r}"
            )


def is_scale(name: str) -> bool:
    """Whether a tensor of a checkpoint is a static scale of attention."""
    return re.search(r"\.(k|v|kv|q|prob)_scale$|\.[qkv]_proj\.output_scale$", name) is not None


def _scale_names(config: DecoderConfig, tensors: Tensors) -> dict[tuple[int, str], str]:
    """Return the tensor of each layer and of K and V; a ValueError if there are two for one."""
    pattern = re.compile(
        rf"{re.escape(config.names.model)}\.layers\.(\d+)\.self_attn\.(?:{_OF_KV.pattern})"
    )
    found: dict[tuple[int, str], str] = {}
    for name in tensors.names():
        match = pattern.fullmatch(name)
        if match is None:
            continue
        for letter in match[2] or match[3]:
            key = int(match[1]), letter
            if key in found:
                raise ValueError(f"{tensors.path} has two scales: {found[key]} and {name}")
            found[key] = name
    return found


def _read(tensors: Tensors, name: str, num_heads: int) -> list[float] | float:
    for shape in ((), (1,), (num_heads,), (num_heads, 1, 1), (1, num_heads, 1, 1)):
        try:
            scales = tensors.read(name, shape)
        except ValueError:
            continue
        values = np.asarray(scales, "float32").reshape(-1).tolist()
        return values[0] if len(values) == 1 else values
    raise ValueError(
        f"{tensors.path}: tensor {name} must be floating-point numbers, one or one for each of "
        f"{num_heads} KV heads"
    )
