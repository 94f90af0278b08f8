#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Greedy generation with and without drafts: tokens/s of decode steps, and what drafts became.

One prompt makes the included model go on with a list, one with prose. The model of random weights
is large enough for its weights to come from memory; it looks at little but the last token, so its
text runs into a cycle: that is the most that drafts can give. Runs with and without drafts
alternate; rates are medians (the best in brackets). Texts are compared, and where they diverge, the
two logits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "tools")]
os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0))))

from random_llama import write_random_llama  # noqa: E402

from tvm_pagedkv_lm import (  # noqa: E402
    DecoderModel,  # noqa: E402
    FinishedEvent,
    SamplingParams,
    Statistics,
    generate,
)

PROMPTS = {
    "repetitive": "".join(
        f"object.__{name}__(self, other)\n" for name in ("add", "sub", "mul", "matmul")
    )
    + "object.",
    "prose": "The with statement is used to wrap the execution of a block with methods defined by",
}
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def run(model: DecoderModel, prompt: str, num_tokens: int, num_drafts: int):
    """Tokens of a greedy continuation, and the statistics."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    tokens = ()
    for event in generate(model, [prompt], params, num_speculative_tokens=num_drafts):
        if isinstance(event, FinishedEvent):
            tokens = event.tokens
        elif isinstance(event, Statistics):
            return tokens, event
    raise AssertionError


def compare(model: DecoderModel, prompt: str, plain: tuple, drafted: tuple) -> str:
    """Whether the texts are the same, or else the gap between the two logits where they part."""
    if plain == drafted:
        return "same text"
    same = next(i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b)
    tokens = [*model.tokenizer.encode(prompt).ids, *plain[:same]]
    cache = model.create_cache(1, len(tokens), len(tokens))
    cache.add_sequence(0)
    (logits,) = model.prefill(cache, [0], [tokens])
    gap = abs(logits[plain[same]] - logits[drafted[same]])
    return f"parts at token {same}, logits {gap:.1g} apart"


def measure(model: DecoderModel, label: str, arguments: argparse.Namespace) -> None:
    """Print a line for each prompt and number of drafts."""
    for name, prompt in PROMPTS.items():
        for drafts in arguments.drafts:
            rates: tuple[list[float], list[float]] = ([], [])
            for _ in range(arguments.repeat):
                plain, without = run(model, prompt, arguments.tokens, 0)
                tokens, s = run(model, prompt, arguments.tokens, drafts)
                for taken, each in zip(rates, (without, s), strict=True):
                    taken.append(each.decode_tokens / each.decode_seconds)
            median = [statistics.median(taken) for taken in rates]
            text = " ".join(
                f"{m:6.0f} ({max(taken):6.0f})" for m, taken in zip(median, rates, strict=True)
            )
            accepted = s.accepted_tokens / max(s.drafted_tokens, 1)
            a_step = s.decode_tokens / (s.decode_tokens - s.accepted_tokens)
            print(
                f"{label:18} {name:10} {drafts:3} {text} {median[1] / median[0]:6.2f}x "
                f"{s.drafted_tokens:7} {accepted:5.0%} {a_step:6.2f} "
                f" {compare(model, prompt, plain, tokens)}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tiny", "random"], help="or directories")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--drafts", nargs="+", type=int, default=[8])
    parser.add_argument("--tokens", type=int, default=200, help="of a continuation")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    header = f"{'model':18} {'prompt':10} {'N':>3} {'plain':>15} {'drafts':>15} {'ratio':>7}"
    print(f"{header} {'drafted':>7} {'right':>5} {'a step':>6}  (tokens/s)")
    with tempfile.TemporaryDirectory() as folder:
        if "random" in arguments.models:
            write_random_llama(Path(folder), LARGE)
        places = {"tiny": None, "random": folder}
        for name in arguments.models:
            for dtype in arguments.dtypes:
                model = DecoderModel.from_pretrained(places.get(name, name), dtype)
                measure(model, f"{Path(name).name} {dtype}", arguments)


if __name__ == "__main__":
    main()
