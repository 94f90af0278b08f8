#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What a budget of positions costs in quality: perplexity of a model, by budget.

Texts begin with a prompt, to which attention is whole; then every token is a decode step, which
attends within the budget. Arithmetic is float32.

    python scripts/bench/bench_quality_budget.py                         # the included model
    python scripts/bench/bench_quality_budget.py --model smollm2 --length 4096 --prompt 3840 \
        --texts 8 --budgets 2048 1024 512 256
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from lib.quality.texts import windows_of

from tvm_pagedkv_lm import DecoderModel, find_model

CHUNK = 512  # rows of a step of the prompt


def losses(model: DecoderModel, texts: np.ndarray, prompt: int, prompts: Path) -> np.ndarray:
    """Losses ``[texts, tokens behind the prompt]``, in nats.

    Parameters
    ----------
    prompts : Path
        A checkpoint with the pages of the prompts, which is written if there is none.
    """
    num_texts, length = texts.shape
    ids, page_size = [*range(num_texts)], model.options.page_size
    cache = model.create_cache(num_texts, num_texts * (length + page_size), CHUNK)
    if prompts.exists():
        cache.load(prompts, ids)
    else:
        for seq_id in ids:
            cache.add_sequence(seq_id)
            for begin in range(0, prompt, CHUNK):
                chunk = texts[seq_id, begin : min(begin + CHUNK, prompt)]
                model.prefill(cache, [seq_id], [chunk])
        cache.save(prompts, ids)
    found = []
    for at in range(prompt, length - 1):
        if sys.stderr.isatty():
            print(f"\r{at - prompt} of {length - 1 - prompt} steps", end="\r", file=sys.stderr)
        logits = model.decode(cache, ids, texts[:, at]).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        chosen = np.take_along_axis(logits, texts[:, at + 1, None], axis=1)[:, 0]
        found.append(np.log(np.exp(logits).sum(-1)) - chosen)
    return np.stack(found, axis=1)


def table(
    model: str | None, texts: np.ndarray, prompt: int, page_size: int, budgets: Sequence[int]
) -> list[tuple[int | None, float, float]]:
    """Print and return budgets, perplexities and their changes from whole attention.

    Changes are printed with their standard error over texts.
    """
    rows, whole = [], None
    with tempfile.TemporaryDirectory() as folder:
        for budget in (None, *budgets):
            options = {"page_size": page_size, "attention_budget": budget}
            loaded = DecoderModel.from_pretrained(model, "float32", **options)
            found = losses(loaded, texts, prompt, Path(folder) / "prompts")
            whole = found if whole is None else whole
            changes = (found - whole).mean(axis=1)
            error = changes.std(ddof=1) / np.sqrt(len(texts)) if len(texts) > 1 else np.nan
            perplexity, change = float(np.exp(found.mean())), float(np.expm1(changes.mean()))
            rows.append((budget, perplexity, change))
            print(
                f"{'all' if budget is None else budget:>6} positions: perplexity "
                f"{perplexity:.4f}, {change:+.3%} +- {error:.3%}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="as for tvm-pagedkv generate (default: tiny)")
    parser.add_argument("--text", default="sources", help="as for bench_quality.py")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 128, 64, 32])
    arguments = parser.parse_args()
    model = find_model(arguments.model or "tiny")
    tokenizer = DecoderModel.from_pretrained(model, "float32")
    windows = windows_of(arguments.text, tokenizer, arguments.texts, arguments.length, seed=0)
    table(model, np.array(windows), arguments.prompt, arguments.page_size, arguments.budgets)


if __name__ == "__main__":
    main()
