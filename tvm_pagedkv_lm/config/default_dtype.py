# SPDX-License-Identifier: Apache-2.0
"""The type in which a model runs if the user names none."""

from __future__ import annotations

from tir_kernels.spec import VectorTarget

from .decoder_config import DecoderConfig


def default_dtype(config: DecoderConfig, target: VectorTarget) -> str:
    """Return the type of weights, activations and pages of a model.

    It is the type of the checkpoint. float16 has two exceptions: bfloat16 for families whose
    activations exceed its range, and float32 on CPUs that do not convert float16 in hardware.

    Parameters
    ----------
    config : DecoderConfig
    target : VectorTarget
        The CPU that the model runs on.

    Returns
    -------
    {"float32", "float16", "bfloat16"}
    """
    if config.dtype != "float16":
        return config.dtype
    if config.overflows_float16:
        return "bfloat16"
    return "float16" if target.has_f16_convert else "float32"
