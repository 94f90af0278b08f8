# SPDX-License-Identifier: Apache-2.0
"""Models whose decode steps attend within a budget, against transformers with that attention."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward  # noqa: E402

from tvm_pagedkv_lm import DecoderModel  # noqa: E402

from ...reference.listed import attention_by_heads, expand_blocks  # noqa: E402
from ...reference.page_bounds import bound_scores, choose_pages, page_bounds  # noqa: E402
from ...support.cases.models.model_cases import (  # noqa: E402
    COMMON,
    PAGE_SIZE,
    VOCAB_SIZE,
    assert_close,
    random_tokens,
    write_checkpoint,
)

BUDGET = 14  # three whole pages of 4
SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FAMILIES = {
    "llama": SHAPE,
    # The layer with a window has no budget.
    "gemma3_text": SHAPE
    | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
}


def within_budget(module, query, key, value, attention_mask, scaling, **options):
    """Attention of transformers whose decode steps see the pages with the largest bounds."""
    if query.shape[2] > 1 or getattr(module, "sliding_window", None):
        return eager_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    q, k, v = (x[0].transpose(0, 1).numpy() for x in (query, key, value))
    own = len(k) - 1
    chosen = choose_pages(bound_scores(q[0], *page_bounds(k, PAGE_SIZE)), BUDGET // PAGE_SIZE)
    positions = expand_blocks(chosen[None], PAGE_SIZE, [own])
    o, _ = attention_by_heads(q, k, v, positions, [own], scaling)
    return torch.tensor(o[None].astype("float32")), None


ALL_ATTENTION_FUNCTIONS.register("within_budget", within_budget)
ALL_MASK_ATTENTION_FUNCTIONS.register("within_budget", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@pytest.mark.parametrize("family", FAMILIES)
def test_decode(family, tmp_path):
    write_checkpoint(tmp_path, family, FAMILIES[family])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="within_budget"
    )
    prompt, tokens = random_tokens(0, 33, 9)
    cache = transformers.DynamicCache(config=theirs.config)
    with torch.no_grad():
        steps = [prompt, *tokens[:, None]]
        expected = [
            theirs(torch.tensor(step[None]), past_key_values=cache).logits[0, -1].numpy()
            for step in steps
        ]
    options = {"page_size": PAGE_SIZE, "attention_budget": BUDGET}
    ours = DecoderModel.from_pretrained(tmp_path, "float32", **options)
    cache = ours.create_cache(2, 128, 64)
    cache.add_sequence(1)  # a prefill of one row is no decode step
    ours.prefill(cache, [1], [prompt[:-1]])
    by_parts = ours.prefill(cache, [1], [prompt[-1:]])[0]
    cache.remove_sequence(1)
    cache.add_sequence(0)
    found = [ours.prefill(cache, [0], [prompt])[0]]
    assert_close(by_parts, found[0])
    cache.fork_sequence(0, 1, 20)  # whose steps do not change those of the other
    found += [ours.decode(cache, [0, 1], [token, token])[0] for token in tokens]
    assert_close(np.stack(found), np.stack(expected))
    with torch.no_grad():
        theirs.set_attn_implementation("eager")
        whole = theirs(torch.tensor([[*prompt, *tokens]])).logits[0, -1].numpy()
    assert np.abs(found[-1] - whole).max() > 0.01, "the budget holds all of attention"
    # Stores and sessions of a model with a budget are not those of the model without one.
    assert ours.options.precision.startswith("float32 ")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention_budget": 7}, ValueError, "must be at least 8 positions, two pages; got 7"),
        ({"attention_budget": "64"}, TypeError, "attention_budget must be an int"),
        ({"attention_budget": 8, "kv_dtype": "int4"}, ValueError, "page_bounds are not possible"),
        ({"attention_budget": 8, "sliding_window": True}, ValueError, "page_bounds need K as it"),
    ],
    ids=str,
)
def test_what_is_refused(changes, error, message, tmp_path):
    write_checkpoint(tmp_path, "llama", SHAPE | {"head_dim": 32})
    with pytest.raises(error, match=message):
        DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE, **changes)


def test_models_that_have_no_layer_for_it(tmp_path):
    fields = COMMON | SHAPE | {"sliding_window": 7, "vocab_size": VOCAB_SIZE}
    write_checkpoint(tmp_path, "mistral", fields)
    with pytest.raises(ValueError, match="the model has none; its layers are of kind mha_sliding"):
        DecoderModel.from_pretrained(tmp_path, page_size=PAGE_SIZE, attention_budget=64)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
