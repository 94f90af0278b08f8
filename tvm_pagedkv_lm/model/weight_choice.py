# SPDX-License-Identifier: Apache-2.0
"""Which matrices of a model are quantized, and how."""

from __future__ import annotations

from dataclasses import replace

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..formats.weight_formats import INT4, INT4_MINIMA, INT8, MXFP4, WeightFormat, can_quantize
from ..weights.tensors import Tensors
from .decoder_weights import Weight, weights

CHOICES = ("auto", "float", "int8", "int4")
_VOCABULARY = ("embed_tokens", "lm_head.weight", "per_layer.table")
_GATES = ".gates.weight"  # decays and rates of recurrences, of which there are few
# They choose and weight experts, and index heads.
_NEVER = (".router.weight", ".shared_gate.weight", ".head_weights.weight")


def check_weights(choice: str) -> None:
    """Raise a ValueError if a choice of weights is unknown."""
    if choice not in CHOICES:
        raise ValueError(f"weights must be one of {', '.join(CHOICES)}; got {choice!r}")


def with_formats(
    options: BuildOptions, config: DecoderConfig, tensors: Tensors, choice: str
) -> BuildOptions:
    """Return options with the formats of the weights of their layers.

    Parameters
    ----------
    choice : {"auto", "float", "int8", "int4"}
        "float": no matrix is quantized. "int8", "int4": all are; with "int4" the vocabulary and
        the gates of recurrences have 8 bits unless the file has them in 4. "auto": those that are
        quantized in the file. Q8_0, Q4_0, Q4_1 and mxfp4 keep their codes, other types are rounded
        to 8 bits. Matrices whose rows cannot be divided into groups are never quantized.
    """
    formats = []
    for name, weight in weights(config, options.layers_of(config)):
        format = _format(name, weight, tensors, choice, options.num_shards)
        if format is not None:
            formats.append((name, format.name))
    return replace(options, formats=tuple(formats))


def _format(
    name: str, weight: Weight, tensors: Tensors, choice: str, num_shards: int
) -> WeightFormat | None:
    if not weight.is_matrix or choice == "float" or name.endswith(_NEVER):
        return None
    in_features = weight.parts[0].in_features
    if weight.split == "columns":
        in_features //= num_shards
    if not can_quantize(in_features):
        return None
    found = {tensors.format(part.name) for part in weight.parts}
    has_eight_bits = name in _VOCABULARY or name.endswith(_GATES)
    has_four_bits = found <= {INT4, INT4_MINIMA}
    if choice != "int8" and found == {MXFP4} and name not in _VOCABULARY:
        return MXFP4
    if choice == "int8" or choice == "int4" and has_eight_bits and not has_four_bits:
        return INT8
    if choice == "int4" or has_four_bits:
        return INT4 if found == {INT4} else INT4_MINIMA
    return None if None in found else INT8
