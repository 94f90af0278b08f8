#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""How much of attention the pages of a budget hold, and what a bound alone could leave out.

A model of transformers reads texts. For the last rows of each, the share of the softmax that the
pages with the largest bounds on ``q . k`` hold is compared with that of the pages that hold most.
The bounds also prove of some pages that they hold less than a part of the softmax: the sum over the
left out pages of ``page_size * exp(bound)`` is at most that part of what the best page holds. The
printed share of such pages says what skipping them could save.

    python scripts/bench/bench_budget_recall.py                    # the included model
    python scripts/bench/bench_budget_recall.py --model smollm2 --length 4096
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from lib.quality.texts import windows_of
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tvm_pagedkv_lm import DecoderModel, find_model

CHUNK = 512  # rows of a step
LEFT_OUT = (1e-2, 1e-3, 1e-4)  # parts of the softmax that pages may hold and be left out


class Recall:
    """Attention that notes, for the last rows of a text, what pages hold.

    Parameters
    ----------
    budgets : sequence of int
    page_size : int
    num_rows : int
        Rows of a text that are measured: its last ones.
    """

    def __init__(self, budgets: Sequence[int], page_size: int, num_rows: int):
        self.budgets, self.page_size, self.num_rows = budgets, page_size, num_rows
        self.is_noting = False
        self.shares: dict[tuple[str, float], list[np.ndarray]] = defaultdict(list)

    def __call__(self, module, query, key, value, attention_mask, scaling, **_):
        """Attend, as transformers calls it, to all positions."""
        heads, kv_heads = query.shape[1], key.shape[1]
        logits = query.view(kv_heads, heads // kv_heads, *query.shape[2:]) @ key[0, :, None].mT
        logits = logits * scaling
        rows, length = logits.shape[-2:]
        unseen = torch.ones(rows, length, dtype=torch.bool).triu(length - rows + 1)
        weights = logits.masked_fill_(unseen, -torch.inf).softmax(-1)
        if self.is_noting:
            last = slice(-self.num_rows, None)
            q = query.view(kv_heads, heads // kv_heads, rows, -1)[:, :, last] * scaling
            self._note(q, key[0], weights[:, :, last])
        o = (weights @ value[0, :, None]).reshape(1, heads, rows, -1)
        return o.transpose(1, 2), None

    def _note(self, q, key, weights) -> None:
        """Note shares of q ``[kv_heads, group, n, dim]``; rows see the last page at least in part.

        Rows count as if they saw all rows of their last page, which holds K from behind them.
        """
        pages = key.view(key.shape[0], -1, self.page_size, key.shape[-1])
        most, least = pages.amax(2)[:, None], pages.amin(2)[:, None]
        bounds = q.clamp(min=0) @ most.mT + q.clamp(max=0) @ least.mT  # [kv, group, n, pages]
        mass = weights.unflatten(-1, (-1, self.page_size)).sum(-1)
        bounds, seen = bounds[..., :-1], mass[..., :-1]  # the last page is always chosen
        tail = mass[..., -1:]
        for budget in self.budgets:
            k = min(budget // self.page_size - 1, seen.shape[-1])
            for name, score in (("bounds", bounds), ("best", seen)):
                score = score.amax(1, keepdim=True).clone()  # of the heads that share K
                score[..., 0] = torch.inf
                index = score.topk(k, -1).indices.expand(*seen.shape[:-1], k)
                held = seen.gather(-1, index).sum(-1) + tail[..., 0]
                self.shares[name, budget].append(held.numpy().ravel())
        proven = torch.log(torch.tensor(float(self.page_size))) + bounds
        largest = (q @ key[:, None].mT).unflatten(-1, (-1, self.page_size))[..., :-1, :]
        base = torch.logsumexp(largest, -1).amax(-1, keepdim=True)  # of the best page
        parts = (proven - base).exp().sort(-1).values.cumsum(-1)
        for part in LEFT_OUT:
            self.shares["skipped", part].append((parts < part).float().mean(-1).numpy().ravel())


def measure(
    folder: Path, texts: list[list[int]], budgets: Sequence[int], page_size: int, num_rows: int
) -> dict[tuple[str, float], float]:
    """Print and return the mean share for each kind, and each budget or part."""
    recall = Recall(budgets, page_size, num_rows)
    ALL_ATTENTION_FUNCTIONS.register("budget_recall", recall)
    files = sorted(folder.glob("*.gguf"))
    from_file = {"gguf_file": files[0].name} if files else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="budget_recall", **from_file
    )
    with torch.no_grad():
        for text in texts:
            cache = transformers.DynamicCache()
            for begin in range(0, len(text), CHUNK):
                recall.is_noting = begin + CHUNK >= len(text)
                part = torch.tensor([text[begin : begin + CHUNK]])
                model(part, past_key_values=cache, logits_to_keep=1)
    means = {key: float(np.concatenate(found).mean()) for key, found in recall.shares.items()}
    for budget in budgets:
        print(
            f"budget {budget}: its pages hold {means['bounds', budget]:.2%} of attention, the best "
            f"ones {means['best', budget]:.2%}"
        )
    for part in LEFT_OUT:
        print(f"pages that provably hold less than {part:g}: {means['skipped', part]:.2%}")
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="as for tvm-pagedkv generate")
    parser.add_argument("--text", default="sources", help="as for bench_quality.py")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="a multiple of the page size")
    parser.add_argument("--rows", type=int, default=64, help="rows of a text that are measured")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 128, 64, 32])
    arguments = parser.parse_args()
    folder = Path(find_model(arguments.model))
    tokenizer = DecoderModel.from_pretrained(folder, "float32")
    texts = windows_of(arguments.text, tokenizer, arguments.texts, arguments.length, seed=0)
    measure(folder, texts, arguments.budgets, arguments.page_size, arguments.rows)


if __name__ == "__main__":
    main()
