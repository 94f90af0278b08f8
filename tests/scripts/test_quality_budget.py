# SPDX-License-Identifier: Apache-2.0
"""What budgets cost: one of the whole text costs nothing, a small one something."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))
from bench_budget_recall import measure
from bench_quality_budget import losses, table

from tvm_pagedkv_lm import DecoderModel, find_model


@pytest.mark.slow
def test_table():
    texts = np.random.default_rng(0).integers(0, 256, (2, 40))
    all_positions, whole, some = table("tiny", texts, prompt=16, page_size=4, budgets=[40, 8])
    assert all_positions == (None, whole[1], 0.0)
    assert abs(whole[2]) < 1e-6 < abs(some[2])


@pytest.mark.slow
def test_losses_are_those_of_the_model(tmp_path):
    text = np.random.default_rng(1).integers(0, 256, 24)
    model = DecoderModel.from_pretrained("tiny", "float32")
    cache = model.create_cache(1, 32, 32)
    cache.add_sequence(0)
    logits = model.logits(cache, [0], [text.tolist()])[0].astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    expected = np.log(np.exp(shifted).sum(-1))[8:-1] - shifted[np.arange(8, 23), text[9:]]
    np.testing.assert_allclose(
        losses(model, text[None], 8, tmp_path / "prompts")[0], expected, atol=1e-3
    )


@pytest.mark.slow
def test_recall():
    """A budget of the whole text holds all of attention; of fewer pages the best ones hold most."""
    text = np.random.default_rng(2).integers(0, 256, 64).tolist()
    means = measure(Path(find_model("tiny")), [text], [64, 24], page_size=4, num_rows=4)
    np.testing.assert_allclose([means["bounds", 64], means["best", 64]], 1.0, atol=1e-5)
    assert means["bounds", 24] < means["best", 24] < 0.99
    assert 0 <= means["skipped", 1e-4] <= means["skipped", 1e-2] < 1
