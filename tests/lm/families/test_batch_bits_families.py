# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers and experts give a sequence the same bits alone and in a batch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tvm_pagedkv_lm import DecoderModel

from ...support.cases.models.model_cases import PAGE_SIZE, random_tokens, write_checkpoint
from . import test_hybrid_families, test_moe_families

FAMILIES = {
    "qwen3_5_text": test_hybrid_families.FAMILIES["qwen3_5_text"],
    "qwen3_moe": test_moe_families.FAMILIES["qwen3_moe"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_alone_and_in_a_batch(family, tmp_path):
    write_checkpoint(tmp_path, family, FAMILIES[family])
    model = DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE)
    prompts = random_tokens(5, 45, 3, 20, 9, 31)

    def steps(parts) -> list[list[bytes]]:
        cache, ids = model.create_cache(6, 512, 256), list(range(len(parts)))
        for i in ids:
            cache.add_sequence(i)
        rows = [model.prefill(cache, ids, parts)]
        rows += [model.decode(cache, ids, [token] * len(ids)) for token in (7, 8, 9)]
        return [[row[i].tobytes() for row in rows] for i in ids]

    assert steps(prompts) == [steps([prompt])[0] for prompt in prompts]
