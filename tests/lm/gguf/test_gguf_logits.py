# SPDX-License-Identifier: Apache-2.0
"""Logits of GGUF files of every family and type of tensor, against Hugging Face transformers."""

from __future__ import annotations

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tvm_pagedkv_lm import DecoderModel  # noqa: E402

from ...support.cases.models.gguf_blocks import TYPES, Blocks  # noqa: E402
from ...support.cases.models.gguf_cases import write_gguf  # noqa: E402
from ...support.cases.models.gguf_families import CASES, SHAPE  # noqa: E402
from ...support.cases.models.model_cases import random_tokens, write_checkpoint  # noqa: E402
from ...support.harness.selections import with_slow  # noqa: E402

TOLERANCE = 1e-3  # of logits in float32
# The longest rows of blocks have 256 elements, and all matrices have rows of this width.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.08,
    "vocab_size": 300,
}
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 32},
    "gemma3_text": {
        "sliding_window": 7,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "olmo2": {},
}
# Families whose logits test_models_families.py compares, and whose weights test_gguf.py does.
FEW = ("llama 3", "gemma3, newer keys")  # the others are left to the long runs
KEYS = {"gemma3_text": {".attention.sliding_window_pattern": [True, False]}}


def assert_same_logits(theirs, file, num_tokens: int) -> None:
    """Compare all rows of a text that is longer than the windows: a prompt, then single tokens."""
    (tokens,) = random_tokens(7, num_tokens)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    assert expected.std() > 0.3, "the logits are too even to tell models apart"
    model = DecoderModel.from_pretrained(file, "float32", page_size=4, weights="float")
    cache = model.create_cache(1, 64)
    cache.add_sequence(0)
    found = [model.logits(cache, [0], [tokens[:-3]])[0]]
    found += [model.decode(cache, [0], [token]) for token in tokens[-3:]]
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in FEW else [pytest.mark.slow])
        for case in CASES
        if case != "gemma2 27B"
    ],
)
def test_rotations_windows_and_biases(case, tmp_path):
    model_type, fields, keys, tensors = CASES[case]
    fields = SHAPE | {"initializer_range": 0.15} | fields
    theirs = write_checkpoint(tmp_path, model_type, fields)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", keys=keys, tensors=tensors)
    assert_same_logits(theirs, file, 24)


@pytest.mark.parametrize("model_type", with_slow(FAMILIES, "qwen2", "qwen3", "gemma3_text"))
def test_types_of_tensors(model_type, tmp_path):
    theirs = write_checkpoint(tmp_path, model_type, WIDE | FAMILIES[model_type])
    for name in TYPES:
        blocks = Blocks(name, seed=11)
        written = {}

        def encode(tensor_name, values, blocks=blocks, written=written):
            raw = blocks.encode(values)
            written[tensor_name] = torch.tensor(blocks.decode(raw))
            return raw

        file = write_gguf(
            tmp_path,
            tmp_path / f"{name}.gguf",
            keys=KEYS.get(model_type),
            quantization=blocks.kind,
            encode=encode,
        )
        assert set(written) >= {n for n, value in theirs.named_parameters() if value.ndim > 1}
        theirs.load_state_dict(written, strict=False)
        assert_same_logits(theirs, file, 12)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
