# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS with weights in mxfp4, as its makers publish them, against transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402

from tvm_pagedkv_lm import DecoderModel, ParallelModel  # noqa: E402

from ...support.cases.models.model_cases import (  # noqa: E402
    PAGE_SIZE,
    assert_close,
    random_tokens,
    write_checkpoint,
)

FIELDS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
}
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], "float32")


def _with_mxfp4(folder, theirs) -> None:
    """Replace the weights of experts by random codes, here and in the model of transformers."""
    rng = np.random.default_rng(0)
    file = folder / "model.safetensors"
    tensors, weights = load_file(file), theirs.state_dict()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = tensors.pop(name).shape  # a row for each input feature
        blocks = rng.integers(0, 256, (count, rows, columns // 32, 16)).astype("uint8")
        scales = rng.integers(122, 125, (count, rows, columns // 32)).astype("uint8")
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(count, rows, -1, 32)
        numbers = NUMBERS[codes] * np.float32(2) ** (scales[..., None].astype("float32") - 127)
        weights[name] = torch.tensor(numbers.reshape(count, rows, columns).swapaxes(1, 2).copy())
    theirs.load_state_dict(weights)
    save_file(tensors, file)
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder and the model of transformers with the numbers of its codes."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    theirs = write_checkpoint(folder, "gpt_oss", FIELDS)
    _with_mxfp4(folder, theirs)
    return folder, theirs


def _logits(theirs, tokens) -> np.ndarray:
    with torch.no_grad():
        return theirs(torch.tensor([list(tokens)])).logits[0].numpy()


def _found(model, tokens) -> np.ndarray:
    cache = model.create_cache(1, 64, 64)
    cache.add_sequence(0)
    return np.concatenate([model.logits(cache, [0], [x])[0] for x in np.split(tokens, [7, 8])])


@pytest.mark.parametrize("weights", [pytest.param("float", marks=pytest.mark.slow), "auto"])
def test_mxfp4_is_exact(checkpoint, weights):
    """Decoded on loading, or kept as codes of 4 bits."""
    folder, theirs = checkpoint
    model = DecoderModel.from_pretrained(folder, "float32", page_size=PAGE_SIZE, weights=weights)
    kept = {name for name, format in model.options.formats if format == "mxfp4"}
    names = {f"layers.{i}.mlp.{part}.weight" for i in range(2) for part in ("gate_up", "down")}
    assert kept == (names if weights == "auto" else set())
    (tokens,) = random_tokens(4, 20)
    found, expected = _found(model, tokens), _logits(theirs, tokens)
    if weights == "float":
        assert_close(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-2)  # activations of 16 bits


@pytest.mark.slow
def test_workers_share_codes_and_biases(checkpoint):
    """Two shards, each of which has half of every expert, and one of which adds the biases."""
    folder, theirs = checkpoint
    (tokens,) = random_tokens(5, 20)
    for weights in ("float", "auto"):
        with ParallelModel.from_pretrained(
            folder, "float32", page_size=PAGE_SIZE, threads=True, num_shards=2, weights=weights
        ) as model:
            found = _found(model, tokens)
        np.testing.assert_allclose(found, _logits(theirs, tokens), rtol=1e-3, atol=2e-2)


def test_sinks_count(checkpoint):
    """With other sinks the logits are others, in layers with and without a window."""
    _, theirs = checkpoint
    (tokens,) = random_tokens(4, 20)
    before = _logits(theirs, tokens)
    for layer in theirs.model.layers:
        layer.self_attn.sinks.data += 1
        assert np.abs(_logits(theirs, tokens) - before).max() > 0.05
        layer.self_attn.sinks.data -= 1


@pytest.mark.parametrize("ending, change, reason", [
    ("gate_up_proj_scales", lambda x: np.full_like(x, 255), "a scale of 255, which stands for NaN"),
    ("gate_up_proj_blocks", lambda x: x[:, :-1], r"has shape \[6, 127, 2, 16\]; expected \[6, 128"),
    ("down_proj_blocks", lambda x: x.astype("float32"), "has type float32; expected one of uint8"),
])  # fmt: skip
def test_damaged_codes_are_refused(checkpoint, tmp_path, ending, change, reason):
    folder, _ = checkpoint
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.mlp.experts.{ending}"
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=reason):
        DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
