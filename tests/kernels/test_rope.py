# SPDX-License-Identifier: Apache-2.0
"""Rotation: tables against the reference and Hugging Face, sines and cosines against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from tir_kernels.cpu.isa import simd
from tir_kernels.cpu.isa.cos_sin import CosSin
from tir_kernels.semantics import rope as rope_module
from tir_kernels.spec import RopeSpec
from tvm_pagedkv.compiler import resolve_target

from .. import reference
from ..support.harness.selections import latin_square

ORIGINAL = 4096

# Hugging Face dictionaries; the last of a kind has what other TVM front ends add to it.
SCALINGS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-gpt-oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn-deepseek": {
        "rope_type": "yarn",
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 16.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn-tvm": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": ORIGINAL,
        "max_position_embeddings": 4 * ORIGINAL,
        "inv_theta_log_scale": 0.0543,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
    "proportional-all": {"rope_type": "proportional"},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": "1..2",
        "long_factor": "1..40",
        "original_max_position_embeddings": ORIGINAL,
        "max_position_embeddings": 32 * ORIGINAL,
    },
    "longrope-factor": {
        "rope_type": "longrope",
        "short_factor": "1..2",
        "long_factor": "1..40",
        "factor": 16.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope-attention-factor": {
        "rope_type": "longrope",
        "short_factor": "1..2",
        "long_factor": "1..40",
        "factor": 16.0,
        "attention_factor": 1.1,
        "original_max_position_embeddings": ORIGINAL,
    },
}


def scaling_of(name: str, rotary_dim: int) -> dict:
    """A dictionary of the table, with factors of the right length in place of ``"low..high"``."""
    scaling = dict(SCALINGS[name])
    for key in ("short_factor", "long_factor"):
        if key in scaling:
            low, high = map(float, scaling[key].split(".."))
            scaling[key] = tuple(np.linspace(low, high, rotary_dim // 2).tolist())
    return scaling


def specs_of(name: str, rotary_dim: int = 128, theta: float = 1e4, scale: float = 1.0):
    """The same rotation for the kernels and for the reference."""
    scaling = scaling_of(name, rotary_dim)
    frozen = tuple(sorted(scaling.items())) or None
    return (
        RopeSpec(theta, scale, rotary_dim, frozen),
        reference.Rope(theta, scale, rotary_dim, scaling),
    )


@pytest.mark.parametrize("use_long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("rotary_dim, theta", [(128, 1e4), (64, 5e5), (20, 1e6)])
@pytest.mark.parametrize("name", SCALINGS)
def test_table_agrees_with_the_reference(name, rotary_dim, theta, use_long):
    spec, expected = specs_of(name, rotary_dim, theta)
    table = rope_module.inverse_frequencies(spec, use_long)
    inverse, attention_factor = reference.inverse_frequencies(expected, use_long)
    assert table.inv_freq.dtype == np.float32
    np.testing.assert_allclose(table.inv_freq, inverse, rtol=2e-7)
    assert table.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("use_long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("rotary_dim, theta", [(128, 1e4), (64, 5e5)])
@pytest.mark.parametrize("name", SCALINGS)
def test_table_agrees_with_transformers(name, rotary_dim, theta, use_long):
    pytest.importorskip("torch", reason="transformers needs torch")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    spec, _ = specs_of(name, rotary_dim, theta)
    scaling = scaling_of(name, rotary_dim)
    if spec.kind == "default":
        inverse, attention_factor = _default_of_transformers(transformers, rotary_dim, theta)
    else:
        config = transformers.LlamaConfig(
            hidden_size=4 * rotary_dim,
            num_attention_heads=4,
            head_dim=rotary_dim,
            max_position_embeddings=scaling.get("max_position_embeddings", ORIGINAL),
            rope_parameters={"rope_theta": theta, **scaling},
        )
        length = ORIGINAL + 1 if use_long else ORIGINAL
        inverse, attention_factor = ROPE_INIT_FUNCTIONS[spec.kind](config, "cpu", seq_len=length)
    table = rope_module.inverse_frequencies(spec, use_long)
    # transformers works in float32 throughout: a few roundings, of which one may be of a power.
    np.testing.assert_allclose(table.inv_freq, inverse.numpy(), rtol=2e-6)
    assert table.attention_factor == pytest.approx(attention_factor, rel=1e-6)


def _default_of_transformers(transformers, rotary_dim: int, theta: float):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=4 * rotary_dim,
        num_attention_heads=4,
        head_dim=rotary_dim,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    embedding = LlamaRotaryEmbedding(config)
    return embedding.inv_freq, embedding.attention_scaling


def test_unknown_type_and_missing_field_are_errors():
    with pytest.raises(ValueError, match="rope_type must be one of .*'dynamic'"):
        rope_module.inverse_frequencies(RopeSpec(scaling=(("rope_type", "dynamic"),)))
    with pytest.raises(ValueError, match="'yarn' needs 'original_max_position_embeddings'"):
        rope_module.inverse_frequencies(RopeSpec(scaling=(("factor", 2.0), ("rope_type", "yarn"))))
    short = (("rope_type", "longrope"), ("short_factor", (1.0,)))
    with pytest.raises(ValueError, match="must be 64 numbers"):
        rope_module.inverse_frequencies(RopeSpec(scaling=short))


def _build(function) -> tvm.ffi.Function:
    module = tvm.tirx.build(function.with_attr("global_symbol", "main"), target=resolve_target())
    return module["main"]


@pytest.mark.parametrize("lanes", [1, 4, 8, 16])
def test_sine_and_cosine_to_three_parts_in_ten_million(lanes):
    def row(angles, out, start):
        value = rope_module.sin_cos(simd.load(angles, (start,), lanes), lanes, simd)
        simd.store(out, (0, start), lanes, value.sin)
        simd.store(out, (1, start), lanes, value.cos)

    @T.prim_func(s_tir=True, private=True)
    def kernel(angles_handle: T.handle, out_handle: T.handle):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        size = T.int64()
        angles = T.match_buffer(angles_handle, (size,), "float32", align=4)
        out = T.match_buffer(out_handle, (2, size), "float32", align=4)
        for block in range(size // lanes):
            row(angles, out, block * lanes)

    rng = np.random.default_rng(0)
    angles = np.concatenate(
        [
            np.linspace(-10, 10, 20000),
            np.arange(20000) * (np.pi / 2),
            rng.uniform(0, 1e6, 20000),
            rng.integers(0, 4_000_000, 20000),
            [0.0, -0.0, 1e-30, 1e-6, 2**22, 3, 7, 11] * 2,
        ]
    ).astype(np.float32)
    out = tvm.runtime.tensor(np.full((2, angles.size), np.nan, np.float32))
    _build(kernel)(tvm.runtime.tensor(angles), out)
    exact = angles.astype(np.float64)
    assert np.abs(out.numpy()[0] - np.sin(exact)).max() < 3e-7
    assert np.abs(out.numpy()[1] - np.cos(exact)).max() < 3e-7


@latin_square(4, "name", "rotary_dim", "scale", "lanes")
@pytest.mark.parametrize(
    "name, rotary_dim, scale",
    [
        ("default", 128, 1.0),
        ("default", 128, 0.25),
        ("default", 40, 1.0),  # halves of 20: a vector of 16 and one of 4
        ("default", 2, 1.0),
        ("default", 22, 1.0),
        ("default", 576, 1.0),
        ("yarn", 64, 1.0),
        ("longrope", 96, 1.0),
    ],
)
@pytest.mark.parametrize("lanes", [8, 16])
def test_rotate_rows(name, rotary_dim, scale, lanes):
    spec, expected = specs_of(name, rotary_dim, scale=scale)

    def row(positions, x, n):
        cos_sin = CosSin(spec, lanes)
        cos_sin.fill(positions[n])
        cos_sin.rotate(  # in place
            lambda dim, width: simd.load(x, (n, dim), width),
            lambda dim, width, value: simd.store(x, (n, dim), width, value),
        )

    @T.prim_func(s_tir=True, private=True)
    def kernel(positions_handle: T.handle, x_handle: T.handle):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        num_rows = T.int64()
        positions = T.match_buffer(positions_handle, (num_rows,), "int32", align=4)
        x = T.match_buffer(x_handle, (num_rows, rotary_dim), "float32", align=4)
        for n in range(num_rows):
            row(positions, x, n)

    rng = np.random.default_rng(rotary_dim)
    positions = np.concatenate([np.arange(40), [ORIGINAL - 1]]).astype(np.int32)
    x = rng.standard_normal((len(positions), rotary_dim), dtype=np.float32)
    out = tvm.runtime.tensor(x)
    _build(kernel)(tvm.runtime.tensor(positions), out)
    reference.assert_close(
        out.numpy()[:, None], reference.rotate(x[:, None], positions, expected), "float32"
    )


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
