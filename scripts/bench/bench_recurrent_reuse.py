#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Reuse of earlier text by a model with recurrent layers: exact, or back to an aligned checkpoint.

    TVM_NUM_THREADS=2 python scripts/bench/bench_recurrent_reuse.py
    python scripts/bench/bench_recurrent_reuse.py --conversation 65536
    python scripts/bench/bench_recurrent_reuse.py --checkpoints 128 512

A random model of Qwen3.5's form answers requests that share text. Policies:

    exact        what the cache does: a hit at any token, a rejected draft is popped
    aligned n    a hit and a pop go back to a multiple of n tokens, and the model computes the rest
    recompute    nothing is reused
    every n      exact, with a checkpoint of the states every n tokens (--checkpoints)

Workloads: 1500 shared and 700 own tokens; short prompts; a long conversation whose last turn is
edited; and 8 drafts a step of which some are rejected. Policies take turns. The table has the
tokens that are reused, as a share of what a model of full attention would reuse, and the median
time to the first token, or of a round of drafts. It needs transformers, torch and tokenizers
(pip install 'tvm_pagedkv[test]').
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from tvm_pagedkv_lm import DecoderModel

VOCAB = 4096
POLICIES = (("exact", 1), ("aligned 64", 64), ("aligned 1024", 1024), ("recompute", None))


def write_model(folder: Path, hidden: int, num_layers: int) -> None:
    """Write a random model, three of whose four layers are gated delta nets."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(hidden // 256, 1),
        head_dim=128,
        linear_num_value_heads=hidden // 64,
        linear_num_key_heads=hidden // 128,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        layer_types=[
            "full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)
        ],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": [6, 5, 5],
        },
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def tokens_of(rng: np.random.Generator, count: int) -> list[int]:
    """Return random tokens."""
    return [int(token) for token in rng.integers(VOCAB, size=count)]


def shared_and_own(shared: int, own: int, count: int, seed: int) -> list[list[int]]:
    """Return prompts that begin with the same text."""
    rng = np.random.default_rng(seed)
    text = tokens_of(rng, shared)
    return [text + tokens_of(rng, own) for _ in range(count)]


def conversation(length: int, count: int, seed: int) -> list[list[int]]:
    """Return a long text again and again, each time with other words at its end."""
    rng = np.random.default_rng(seed)
    text = tokens_of(rng, length)
    return [text[: length - 150 + 11 * i] + tokens_of(rng, 120) for i in range(count)]


def longest_common(prompt: list[int], earlier: list[list[int]]) -> int:
    """Tokens that a model of full attention would reuse: all but the last one at most."""
    best = 0
    for text in earlier:
        size = min(len(text), len(prompt))
        same = np.equal(text[:size], prompt[:size])
        best = max(best, size if same.all() else int(same.argmin()))
    return min(best, len(prompt) - 1)


def with_checkpoints(model: DecoderModel, count: int) -> DecoderModel:
    """Return the model with a checkpoint of its states every so many tokens."""
    layers = tuple(
        layer
        if layer.recurrent is None
        else replace(layer, recurrent=replace(layer.recurrent, checkpoint_tokens=count))
        for layer in model.config.cache_layers
    )
    other = copy.copy(model)
    other.config = replace(model.config, layers=layers)
    return other


class Engine:
    """A model and its cache, under a policy."""

    def __init__(self, model: DecoderModel, align: int | None, max_tokens: int):
        self.model, self.align = model, align
        self.cache = model.create_cache(2, max_tokens, 512)

    def prefill(self, seq_id: int, tokens: list[int]) -> None:
        """Append a text in chunks, and record it."""
        for begin in range(0, len(tokens), 512):
            part = tokens[begin : begin + 512]
            self.model.prefill(self.cache, [seq_id], [part])
            if self.align is not None:
                self.cache.record_tokens(seq_id, part)

    def begin(self, seq_id: int, prompt: list[int]) -> int:
        """Add a sequence. Return how many of its tokens are reused."""
        if self.align is None:
            self.cache.add_sequence(seq_id)
            return 0
        length = self.cache.match_prefix(prompt)
        return self.cache.add_sequence(seq_id, prompt[: length - length % self.align + 1])

    def answer(self, prompt: list[int]) -> tuple[int, float]:
        """Return the tokens that were reused, and the seconds to the first token."""
        began = time.perf_counter()
        reused = self.begin(0, prompt)
        self.prefill(0, prompt[reused:])
        seconds = time.perf_counter() - began
        self.cache.remove_sequence(0)
        return reused, seconds

    def draft(self, context: list[int], rounds: int, seed: int) -> Iterator[tuple[int, int, float]]:
        """Yield of each round: tokens computed again, tokens kept before it, seconds."""
        rng = np.random.default_rng(seed)
        text = list(context)
        self.cache.add_sequence(0)
        self.prefill(0, text)
        for _ in range(rounds):
            drafts, accepted = tokens_of(rng, 8), int(rng.integers(1, 9))
            began = time.perf_counter()
            self.model.prefill(self.cache, [0], [drafts])
            text += drafts[:accepted]
            kept = len(text)
            if accepted < 8:
                kept = 0 if self.align is None else kept - kept % self.align
            self.cache.pop_n(0, self.cache.sequence_length(0) - kept)
            again = text[self.cache.sequence_length(0) :]
            self.prefill(0, again)
            yield len(again), len(text) - accepted, time.perf_counter() - began
        self.cache.remove_sequence(0)


def measure_prompts(engines: list[Engine], prompts: list[list[int]]) -> list[tuple[float, float]]:
    """Let every engine answer each prompt, in an order that rotates.

    Returns
    -------
    list of (float, float)
        Of each engine the share of what full attention would reuse, and the median seconds of a
        hit.
    """
    reused, seconds, possible = [0] * len(engines), [[] for _ in engines], 0
    for i, prompt in enumerate(prompts):
        possible += longest_common(prompt, prompts[:i])
        for turn in range(len(engines)):  # none always follows one that fills the CPU's caches
            k = (i + turn) % len(engines)
            found, took = engines[k].answer(prompt)
            if i > 0:  # the first one has nothing to reuse
                reused[k] += found
                seconds[k].append(took)
    medians = [statistics.median(times) for times in seconds]
    return [(count / possible, median) for count, median in zip(reused, medians, strict=True)]


def measure_drafts(engines: list[Engine], rounds: int) -> list[tuple[float, float]]:
    """Return of each engine the share of kept tokens that rounds do not compute again, and their
    median seconds. The engines take a round each in turns.
    """
    context = tokens_of(np.random.default_rng(4), 1000)
    found = list(zip(*(engine.draft(context, rounds, 5) for engine in engines), strict=True))
    cells = []
    for each in zip(*found, strict=True):
        again, kept = sum(a for a, _, _ in each), sum(k for _, k, _ in each)
        cells.append((1 - again / kept, statistics.median(seconds for _, _, seconds in each)))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 256")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--conversation", type=int, default=8192, help="tokens")
    parser.add_argument("--requests", type=int, default=13)
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[], metavar="TOKENS")
    options = parser.parse_args()
    workloads = {
        "1500 shared + 700 own": shared_and_own(1500, 700, options.requests, 1),
        "250 shared + 50 own": shared_and_own(250, 50, options.requests, 2),
        f"{options.conversation} tokens, edited": conversation(
            options.conversation, options.requests, 3
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.hidden, options.layers)
        model = DecoderModel.from_pretrained(folder, dtype="bfloat16", progress=print)
    policies = [(name, model, align) for name, align in POLICIES]
    if options.checkpoints:
        policies = [(f"every {n}", with_checkpoints(model, n), 1) for n in options.checkpoints]
    print(f"{'workload':28s}" + "".join(f"{name:>24s}" for name, _, _ in policies))
    for name, prompts in workloads.items():
        longest = max(map(len, prompts))
        room = longest * 2 + sum(len(p) for p in prompts if longest < 4000)
        print_row(name, measure_prompts([Engine(m, a, room) for _, m, a in policies], prompts))
    print_row("8 drafts a round", measure_drafts([Engine(m, a, 4096) for _, m, a in policies], 40))


def print_row(name: str, cells: list[tuple[float, float]]) -> None:
    """Print shares and times."""
    texts = [f"{share:.1%} {1e3 * seconds:9.1f} ms" for share, seconds in cells]
    print(f"{name:28s}" + "".join(f"{text:>24s}" for text in texts), flush=True)


if __name__ == "__main__":
    main()
