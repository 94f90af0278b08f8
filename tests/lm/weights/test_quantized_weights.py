# SPDX-License-Identifier: Apache-2.0
"""Models whose weights are kept in 8 or 4 bits, against models with the same numbers as floats."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tvm_pagedkv_lm import DecoderModel, ParallelModel
from tvm_pagedkv_lm.formats.weight_formats import INT4_MINIMA, INT8, quantize
from tvm_pagedkv_lm.model.source import TINY

# Of logits whose standard deviation is 3 or so: activations have 16 bits.
TOLERANCE = 5e-3


def _rounded(folder, choice: str):
    """Write the included model with the numbers that its quantized weights stand for."""
    shutil.copytree(TINY, folder)
    tensors = load_file(TINY / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            is_vocabulary = "embed_tokens" in name or "lm_head" in name
            format = INT8 if choice == "int8" or is_vocabulary else INT4_MINIMA
            tensors[name] = quantize(tensor, format).values()
    save_file(tensors, folder / "model.safetensors")
    return folder


def _logits(model) -> np.ndarray:
    cache = model.create_cache(1, 64)
    for step, tokens in enumerate(([3, 5, 8, 13, 21, 34, 55], [9], [11])):
        if step == 0:
            cache.add_sequence(0)
        rows = model.logits(cache, [0], [tokens])[0]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["int8", "int4"])
def test_logits_are_those_of_the_rounded_weights(choice, tmp_path):
    found = DecoderModel.from_pretrained(TINY, "float32", weights=choice)
    exact = DecoderModel.from_pretrained(_rounded(tmp_path / "model", choice), "float32")
    assert not exact.options.formats
    expected = _logits(exact)
    assert expected.std() > 1
    np.testing.assert_allclose(_logits(found), expected, atol=TOLERANCE)
    per_weight = {"int8": 1.07, "int4": 0.9}[choice]
    assert found.matrix_bytes < per_weight * exact.matrix_bytes / 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_1", "Q5_0"])
def test_gguf_files_keep_their_codes(name, tmp_path):
    """The codes stand for the very numbers of the file; those of other types become int8."""
    gguf = pytest.importorskip("gguf")
    from ...support.cases.models.gguf_cases import write_gguf

    fields = json.loads((TINY / "config.json").read_text())
    assert fields["hidden_size"] % 32 == 0
    file = tmp_path / "model.gguf"
    write_gguf(TINY, file, quantization=gguf.GGMLQuantizationType[name])
    found = DecoderModel.from_pretrained(file, "float32")
    expected_format = {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4_minima", "Q5_0": "int8"}[name]
    assert {format for _, format in found.options.formats} == {expected_format}
    exact = DecoderModel.from_pretrained(file, "float32", weights="float")
    assert not exact.options.formats
    expected = _logits(exact)
    if name == "Q5_0":
        assert (_logits(found) - expected).std() < 0.05 * expected.std()
    else:
        np.testing.assert_allclose(_logits(found), expected, atol=TOLERANCE)


@pytest.mark.slow
def test_workers_share_quantized_matrices():
    expected = _logits(DecoderModel.from_pretrained(TINY, "float32", weights="int8"))
    with ParallelModel.from_pretrained(
        TINY, "float32", num_shards=2, weights="int8", threads=True
    ) as model:
        np.testing.assert_allclose(_logits(model), expected, atol=TOLERANCE)


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="weights must be one of auto, float, int8, int4; got 'x'"):
        DecoderModel.from_pretrained(TINY, weights="x")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
