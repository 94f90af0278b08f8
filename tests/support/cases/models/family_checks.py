# SPDX-License-Identifier: Apache-2.0
"""Checks that families of models have in common, beside the steps of `model_cases.CHECKS`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .model_cases import Pair, assert_close, random_tokens, write_checkpoint


def check_token_trees(pair: Pair) -> None:
    """Rows of a branch continue their parents; a commit keeps one branch."""
    tokens, drafts, more = random_tokens(2, 13, 6, 4)
    parents = [-1, 0, 1, 0, 3, -1]
    cache = pair.cache()
    cache.add_sequence(0)
    pair.ours.prefill(cache, [0], [tokens])
    logits = pair.ours.logits(cache, [0], [drafts], [parents])[0]
    for node, row in enumerate(logits):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        assert_close(row, pair.expected([*tokens, *drafts[path]])[-1])
    cache.commit_tree([0], [4])
    text = [*tokens, *drafts[[0, 3, 4]], *more]
    assert_close(pair.ours.logits(cache, [0], [more])[0], pair.expected(text)[-4:])
    cache.check_integrity()


def check_prompts_that_begin_alike(pair: Pair) -> None:
    """A prompt that begins as a removed one continues from its pages."""
    tokens, own = random_tokens(3, 24, 8)
    cache = pair.cache()
    cache.add_sequence(0, tokens)
    pair.ours.prefill(cache, [0], [tokens])
    cache.record_tokens(0, tokens)
    cache.remove_sequence(0)
    prompt = [*tokens, *own]
    length = cache.add_sequence(1, prompt)
    assert length >= 20
    logits = pair.ours.logits(cache, [1], [prompt[length:]])[0]
    assert_close(logits, pair.expected(prompt)[length:])


def check_another_value_matters(
    folder: Path, family: str, fields: dict[str, Any], other: dict[str, Any]
) -> None:
    """With another value of a field, transformers' logits are others, or no test notices it."""
    tokens = torch.tensor([list(random_tokens(0, 41)[0])])
    logits = []
    for each in (fields, fields | other):
        with torch.no_grad():
            logits.append(write_checkpoint(folder, family, each)(tokens).logits[0, 36:])
    assert (logits[0] - logits[1]).abs().max() > 0.05
