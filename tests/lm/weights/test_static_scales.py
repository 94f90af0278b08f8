# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with static scales of K and V, against transformers with K and V rounded by them."""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tvm_pagedkv_lm import DecoderModel
from tvm_pagedkv_lm.families.registry import config_from_fields
from tvm_pagedkv_lm.model.source import TINY

NAME = "model.layers.{}.self_attn.{}"
# Of each layer, the names and the scales of K and V; the largest values are cut off.
SCALES = [
    {"k_scale": [0.01], "v_scale": [0.004]},
    {"k_proj.k_scale": [0.012, 0.02], "v_proj.v_scale": [0.003, 0.006]},
    {"attn.k_scale": 0.015, "attn.v_scale": 0.005},
    {"kv_scale": [[[0.01]], [[0.008]]]},
]
OLDER = {"k_proj.output_scale": 0.02, "v_proj.output_scale": 0.01}  # as compressed-tensors began
TOKENS = np.random.default_rng(0).integers(0, 256, 60)


def checkpoint(folder, scales=SCALES, dtype="float32", of="int"):
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": of, "strategy": "tensor", "dynamic": False}
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    config["quantization_config"] = quantization | {"config_groups": {}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(TINY / "model.safetensors")
    for layer, named in enumerate(scales):
        for name, values in named.items():
            tensors[NAME.format(layer, name)] = np.array(values, dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits_of(model: DecoderModel) -> np.ndarray:
    cache = model.create_cache(1, 64)
    cache.add_sequence(0)
    chunks = np.split(TOKENS, [7, 8, 40, 41])
    return np.concatenate([model.logits(cache, [0], [chunk])[0] for chunk in chunks])


def test_scales_are_not_needed(tmp_path):
    found = DecoderModel.from_pretrained(checkpoint(tmp_path / "model"), "float32")
    expected = DecoderModel.from_pretrained(TINY, "float32")
    np.testing.assert_array_equal(logits_of(found), logits_of(expected))


def test_older_names_and_files_of_modelopt(tmp_path):
    older = checkpoint(tmp_path / "older", [OLDER] * 4)
    newer = checkpoint(tmp_path / "newer", [{"k_scale": 0.02, "v_scale": 0.01}] * 4)
    config = json.loads((newer / "config.json").read_text())
    for fields, kv_dtype in (
        ({"quant_algo": None, "kv_cache_quant_algo": "INT8"}, "int8"),
        ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "float8_e4m3fn"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "float8_e4m3fn"),
    ):
        config["quantization_config"] = {"quant_method": "modelopt", **fields}
        assert config_from_fields(config).calibrated_for == kv_dtype
    config["quantization_config"] |= {"quant_algo": "FP8"}
    with pytest.raises(ValueError, match="quantized weights"):
        config_from_fields(config)
    models = [
        DecoderModel.from_pretrained(each, "float32", kv_dtype="int8", kv_scales="checkpoint")
        for each in (older, newer)
    ]
    assert models[0].options.kv_scales == models[1].options.kv_scales
    rows = [logits_of(DecoderModel.from_pretrained(each, "float32")) for each in (older, TINY)]
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
def test_logits(kv_dtype, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    factor = 1 if kv_dtype == "float8_e4m3fn" else 3.5
    scaled = [{n: (np.array(v) * factor).tolist() for n, v in each.items()} for each in SCALES]
    folder = checkpoint(tmp_path / "model", scaled, of=kv_dtype.rstrip("_e4m3fn8"))
    model = DecoderModel.from_pretrained(
        folder, "float32", kv_dtype=kv_dtype, kv_scales="checkpoint"
    )

    class Rounded(transformers.DynamicCache):
        """The cache of transformers, with K and V as the pages give them back."""

        def update(self, k, v, layer_idx, *args, **more):
            values = list(scaled[layer_idx].values())
            both = [
                torch.from_numpy(rounded(x.numpy(), np.float32(scale).reshape(-1, 1, 1), kv_dtype))
                for x, scale in zip((k, v), values if len(values) == 2 else values * 2, strict=True)
            ]
            return super().update(*both, layer_idx, *args, **more)

    torch.manual_seed(0)
    reference = transformers.LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        tokens = torch.from_numpy(TOKENS[None])
        expected = reference(tokens, past_key_values=Rounded()).logits[0].numpy()
        exact = reference(tokens).logits[0].numpy()
    found = logits_of(model)
    rounding = (expected - exact).std()
    assert rounding > 0.01 * exact.std()
    # A value between two codes may get the other one.
    assert (found - expected).std() < 0.1 * rounding
    by_rows = DecoderModel.from_pretrained(folder, "float32", kv_dtype=kv_dtype)
    assert (logits_of(by_rows) - expected).std() > 0.5 * rounding


def rounded(rows: np.ndarray, scales: np.ndarray, kv_dtype: str) -> np.ndarray:
    """Rows ``[1, heads, n, width]`` as codes times scales ``[heads or 1, 1, 1]``."""
    values = rows / scales
    if kv_dtype == "int8":
        return np.clip(np.rint(values), -127, 127) * scales
    codes = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float32) * scales


def test_names_of_caches_tell_the_scales(tmp_path):
    """Prefixes that are kept on disk are found again by models of the same scales alone."""
    how = {"kv_dtype": "int8", "kv_scales": "checkpoint"}
    folder = checkpoint(tmp_path / "model", dtype="float16")
    other = checkpoint(tmp_path / "other", [{"k_scale": 0.5, "v_scale": 0.5}] * 4)
    models = [DecoderModel.from_pretrained(each, "float32", **how) for each in (folder, other)]
    rows = DecoderModel.from_pretrained(folder, "float32", kv_dtype="int8")
    assert len({each.options.precision for each in (*models, rows)}) == 3
    assert models[0].library == rows.library  # its code knows nothing of them


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ([], "has no static scales of K and V, such as model.layers.0.self_attn.k_scale"),
        (SCALES[:2], "lacks k_scale of layer 2"),
        ([*SCALES[:3], {"k_scale": 0.1}], "lacks v_scale of layer 3"),
        ([*SCALES[:3], {"kv_scale": 0.1, "v_scale": 0.1}], "has two scales"),
        ([*SCALES[:3], {"kv_scale": [0.1, 0.1, 0.1]}], "one for each of 2 KV heads"),
        ([*SCALES[:3], {"kv_scale": 0.0}], "layer 3: layer.kv_scales must be positive"),
        ([*SCALES[:3], {"kv_scale": float("nan")}], "layer 3: layer.kv_scales must be positive"),
    ],
)
def test_checkpoints_without_scales_of_all_layers(scales, message, tmp_path):
    folder = checkpoint(tmp_path / "model", scales)
    with pytest.raises(ValueError, match=message):
        DecoderModel.from_pretrained(folder, "float32", kv_dtype="int8", kv_scales="checkpoint")


def test_choices_that_cannot_be(tmp_path):
    folder = checkpoint(tmp_path / "model")
    with pytest.raises(ValueError, match="kv_scales are for kv_dtype"):
        DecoderModel.from_pretrained(folder, "float32", kv_scales="checkpoint")
    for kv_dtype, name in (
        ("float8_e4m3fn", "float8_e4m3fn"),
        (("int8", "float8_e4m3fn"), "float8_e4m3fn"),
        ("int4", "int4"),
    ):
        with pytest.raises(ValueError, match=f"are for kv_dtype 'int8', got '{name}'"):
            DecoderModel.from_pretrained(folder, kv_dtype=kv_dtype, kv_scales="checkpoint")
    with pytest.raises(ValueError, match="kv_scales must be one of row, checkpoint"):
        DecoderModel.from_pretrained(folder, kv_scales="x")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
