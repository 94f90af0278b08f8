# SPDX-License-Identifier: Apache-2.0
"""Workers that share a small random hybrid: stages and shards, against transformers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tvm_pagedkv_lm import DecoderModel, ParallelModel  # noqa: E402

from ...support.cases.models.model_cases import (  # noqa: E402
    PAGE_SIZE,
    assert_close,
    random_tokens,
    write_checkpoint,
)
from ...support.harness.selections import few_of  # noqa: E402
from .test_hybrid_families import FAMILIES  # noqa: E402

WORKERS = {
    "qwen3_5_text": ("qwen3_5_text", {}, {"num_shards": 2}),
    "qwen3_5_text, stages": ("qwen3_5_text", {}, {"num_shards": 2, "stages": 2}),
    "qwen3_5_text, one key head": (
        "qwen3_5_text", {"linear_num_key_heads": 1}, {"num_shards": 2, "stages": 1}
    ),
    "qwen3_5_text, int8": ("qwen3_5_text", {}, {"num_shards": 2, "weights": "int8"}),
    "falcon_h1": ("falcon_h1", {}, {"num_shards": 2, "stages": 2}),
    "falcon_h1, one group": (
        "falcon_h1", {"mamba_n_groups": 1, "mamba_rms_norm": False}, {"num_shards": 2}
    ),
    "falcon_h1, one norm": (
        "falcon_h1", {"mamba_n_groups": 1, "mamba_norm_before_gate": True}, {"num_shards": 2}
    ),
    "granitemoehybrid": ("granitemoehybrid", {}, {"num_shards": 2}),
    "mamba2": ("mamba2", {}, {"num_shards": 2}),
    "mamba2, one norm": ("mamba2", {"n_groups": 1}, {"num_shards": 2}),
    "lfm2": ("lfm2", {}, {"num_shards": 2, "stages": 2}),
    "kimi_linear": ("kimi_linear", {}, {"stages": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", few_of(WORKERS, 1))
def test_workers_have_the_states_of_their_layers_and_heads(name, tmp_path):
    family, changes, split = WORKERS[name]
    theirs = write_checkpoint(tmp_path, family, FAMILIES[family] | changes)
    tokens, other = random_tokens(5, 20, 4)
    forked = [*tokens[:13], *other]
    with torch.no_grad():
        expected, fork = (
            theirs(torch.tensor([list(text)])).logits[0].numpy() for text in (tokens, forked)
        )
    options = {"page_size": PAGE_SIZE, "threads": True, **split}
    with ParallelModel.from_pretrained(tmp_path, "float32", **options) as model:
        cache = model.create_cache(2, 64, 64)
        cache.add_sequence(0)
        chunks = np.split(tokens, [7, 8])
        found = np.concatenate([model.logits(cache, [0], [x])[0] for x in chunks])
        cache.fork_sequence(0, 1, 13)
        found_fork = model.logits(cache, [1], [other])[0]
    for got, wanted in ((found, expected), (found_fork, fork[13:])):
        if "weights" in split:
            assert np.abs(got - wanted).max() < 0.1 * np.abs(wanted).max()
        else:
            assert_close(got, wanted)


@pytest.mark.slow
def test_workers_round_states_as_one_does(tmp_path):
    """Products of a shard are sums of another order, and a number may be rounded the other way."""
    write_checkpoint(tmp_path, "qwen3_5_text", FAMILIES["qwen3_5_text"])
    (tokens,) = random_tokens(5, 20)
    options, found = {"page_size": PAGE_SIZE, "state_dtype": "bfloat16"}, []
    one = DecoderModel.from_pretrained(tmp_path, "float32", **options)
    two = ParallelModel.from_pretrained(tmp_path, "float32", num_shards=2, threads=True, **options)
    with two:
        for model in (one, two):
            cache = model.create_cache(2, 64, 64)
            cache.add_sequence(0)
            found.append(model.logits(cache, [0], [tokens])[0])
    assert np.abs(found[0] - found[1]).max() < 0.02 * np.abs(found[0]).max()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
