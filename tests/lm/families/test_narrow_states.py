# SPDX-License-Identifier: Apache-2.0
"""Models whose recurrent layers keep states of 16 bits, against transformers in float32."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tvm_pagedkv_lm import DecoderModel

from ...support.cases.models.model_cases import PAGE_SIZE, Pair, random_tokens
from .test_hybrid_families import FAMILIES


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("qwen"), "qwen3_5_text", FAMILIES["qwen3_5_text"])


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.05), ("float16", 0.006)])
def test_states_of_a_narrow_type(qwen, dtype, limit):
    """In odd chunks, behind a fork and a hit: close to transformers, and closer to each other."""
    tokens, own = random_tokens(6, 45, 6)
    how = {"page_size": PAGE_SIZE, "state_dtype": dtype}
    model = DecoderModel.from_pretrained(qwen.folder, "float32", **how)
    cache = model.create_cache(2, 256, 64)
    assert cache.description["recurrent_layers"][0]["state_dtype"] == dtype
    cache.add_sequence(0)
    chunks = np.split(tokens, [7, 8, 30])
    found = np.concatenate([model.logits(cache, [0], [chunk])[0] for chunk in chunks])
    expected = qwen.expected(tokens)
    size = np.abs(expected).max()
    assert 1e-4 * size < np.abs(found - expected).max() < limit * size
    cache.fork_sequence(0, 1, 23)
    forked = model.logits(cache, [1], [tokens[23:]])[0]
    assert np.abs(forked - found[23:]).max() < limit / 2 * size
    cache.record_tokens(0, tokens)
    cache.remove_sequence(0)
    cache.remove_sequence(1)
    prompt = [*tokens[:37], *own]
    assert cache.add_sequence(2, prompt) == 37
    found = model.logits(cache, [2], [own])[0]
    assert np.abs(found - qwen.expected(prompt)[37:]).max() < limit * size
    cache.check_integrity()


def test_a_model_without_states_has_no_type_for_them():
    with pytest.raises(ValueError, match="state_dtype 'bfloat16' is for models with recurrent"):
        DecoderModel.from_pretrained(None, state_dtype="bfloat16")
    with pytest.raises(ValueError, match="state_dtype must be one of float32, float16, bfloat16"):
        DecoderModel.from_pretrained(None, state_dtype="int8")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
