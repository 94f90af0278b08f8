# SPDX-License-Identifier: Apache-2.0
"""The specification of rotary position embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Rope:
    """A rotation: base, factor on the position, rotated dims, Hugging Face scaling dictionary."""

    theta: float = 10000.0
    scale: float = 1.0
    rotary_dim: int = 128
    scaling: dict = field(default_factory=dict)


def inverse_frequencies(rope: Rope, use_long: bool = False) -> tuple[np.ndarray, float]:
    """Return float32 inverse frequencies ``[rotary_dim / 2]`` and the factor on cos and sin.

    Sources: Su et al., RoFormer (2021); Llama 3.1 report; Peng et al., YaRN (2023); Ding et al.,
    LongRoPE (2024); the field names are those of Hugging Face configurations.
    """
    dim, theta, scaling = rope.rotary_dim, rope.theta, dict(rope.scaling)
    kind = scaling.get("rope_type", "default")
    inverse = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    attention = 1.0
    if kind == "linear":
        inverse = inverse / scaling["factor"]
    elif kind == "llama3":
        low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
        high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
        for i, f in enumerate(inverse):
            wavelength = 2 * math.pi / f
            if wavelength > low:
                inverse[i] = f / scaling["factor"]
            elif wavelength > high:
                smooth = (low / wavelength - 1) / (low / high - 1)
                inverse[i] = (1 - smooth) * f / scaling["factor"] + smooth * f
    elif kind == "yarn":
        factor = scaling["factor"]
        original = scaling["original_max_position_embeddings"]

        def dimension_of(rotations: float) -> float:
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = dimension_of(scaling.get("beta_fast") or 32)
        high = dimension_of(scaling.get("beta_slow") or 1)
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
        inverse = inverse / factor * ramp + inverse * (1 - ramp)

        def magnitude(m: float = 1.0) -> float:
            return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

        attention = scaling.get("attention_factor")
        if attention is None:
            mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
            both = mscale and mscale_all
            attention = magnitude(mscale) / magnitude(mscale_all) if both else magnitude()
    elif kind == "longrope":
        original = scaling["original_max_position_embeddings"]
        factors = scaling["long_factor" if use_long else "short_factor"]
        inverse = inverse / np.asarray(factors, dtype=np.float32).astype(np.float64)
        factor = (
            scaling.get("factor") or scaling.get("max_position_embeddings", original) / original
        )
        attention = scaling.get("attention_factor")
        if attention is None:
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    elif kind == "proportional":  # Gemma 4, in transformers
        turning = int(scaling.get("partial_rotary_factor", 1.0) * dim // 2)
        inverse = np.where(np.arange(dim // 2) < turning, inverse, 0) / scaling.get("factor", 1.0)
    elif kind != "default":
        raise ValueError(f"no reference for rope_type {kind!r}")
    return inverse.astype(np.float32), float(attention)


def rotate(
    x: np.ndarray, positions: np.ndarray, rope: Rope, total: int | None = None
) -> np.ndarray:
    """Rotate ``x [T, H, D]`` by ``positions [T]``; dimension i pairs with i + rotary_dim / 2.

    `total` is the length of the sequence after the step; longrope chooses its factors by it (None:
    the last position of `positions` plus one).
    """
    x = np.asarray(x, dtype=np.float64)
    if len(x) == 0:
        return x
    total = int(positions.max()) + 1 if total is None else total
    limit = rope.scaling.get("original_max_position_embeddings", math.inf)
    inverse, attention = inverse_frequencies(rope, use_long=total > limit)
    scaled = np.asarray(positions, dtype=np.float32) * np.float32(rope.scale)
    angle = (scaled[:, None] * inverse[None, :]).astype(np.float64)  # float32, as models compute it
    cos, sin = np.cos(angle)[:, None] * attention, np.sin(angle)[:, None] * attention
    half = rope.rotary_dim // 2
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
