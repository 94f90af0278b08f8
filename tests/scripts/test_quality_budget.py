# SPDX-License-Identifier: Apache-2.0
"""`quality_budget.py`: a budget of the whole text costs nothing, a small one something."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))
from quality_budget import Model, losses, table  # noqa: E402

from tvm_pagedkv.models import DecoderModel  # noqa: E402


@pytest.mark.slow
def test_table():
    texts = np.random.default_rng(0).integers(0, 256, (2, 40))
    all_positions, whole, some = table(texts, prompt=16, page_size=4, budgets=[40, 8])
    assert all_positions == (None, whole[1], 0.0)
    assert abs(whole[2]) < 1e-6 < abs(some[2])


@pytest.mark.slow
def test_losses_are_those_of_the_model():
    text = np.random.default_rng(1).integers(0, 256, 24)
    model = DecoderModel.from_pretrained("tiny", "float32")
    cache = model.create_cache(1, 32, 32)
    cache.add_sequence(0)
    logits = model.logits(cache, [0], [text.tolist()])[0].astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    expected = np.log(np.exp(shifted).sum(-1))[8:-1] - shifted[np.arange(8, 23), text[9:]]
    np.testing.assert_allclose(losses(Model(), text[None], 8, 4, None)[0], expected, atol=1e-3)
