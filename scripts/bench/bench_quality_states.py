#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Error of recurrent states of a narrow type, by how long a head remembers.

    python scripts/bench/bench_quality_states.py
    python scripts/bench/bench_quality_states.py --tokens 65536 --rule mamba2

Caches with states of each type take the same random tokens. The error is that of the outputs of the
last 256 tokens, relative to those of float32 states. A head whose decays have a half-life of h
tokens forgets a rounding as fast as it forgets a token.
"""

from __future__ import annotations

import argparse

import numpy as np

import tvm_pagedkv as pkv
from tvm_pagedkv.config import RECURRENT_RULES

HALF_LIVES = (8, 64, 512, 4096, float("inf"))  # tokens
DIM, CHUNK, MEASURED = 128, 256, 256
NARROW = ("bfloat16", "float16")


def make_cache(rule: str, state_dtype: str, num_tokens: int) -> pkv.KVCache:
    """One layer with a head for each half-life."""
    heads = len(HALF_LIVES)
    state = pkv.RecurrentConfig(
        rule, heads, heads, DIM, DIM, history_tokens=0, state_dtype=state_dtype
    )
    return pkv.create(
        pkv.KVCacheConfig(
            num_layers=1,
            num_qo_heads=1,
            num_kv_heads=1,
            qk_head_dim=DIM,
            dtype="float32",
            max_num_sequences=1,
            max_total_tokens=num_tokens,
            prefill_chunk_size=CHUNK,
            layers=[pkv.LayerSpec("recurrent", recurrent=state)],
        )
    )


def random_rows(rule: str, rng: np.random.Generator) -> list[np.ndarray]:
    """Unit keys, as models have them, and decays that vary about their half-lives."""
    heads = len(HALF_LIVES)
    q, k, v = (rng.standard_normal((CHUNK, heads, DIM), np.float32) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gates = (CHUNK, heads, DIM) if rule == "kda" else (CHUNK, heads)
    rates = np.log(2) / np.array(HALF_LIVES).reshape(-1, *(1,) * (len(gates) - 2))
    decays = -(rates * rng.exponential(1, gates)).astype(np.float32)
    has_delta = rule in ("gated_delta", "kda")
    return [q, k, v, decays, *([rng.random((CHUNK, heads), np.float32)] if has_delta else [])]


def errors_of(rule: str, num_tokens: int) -> dict[str, np.ndarray]:
    """Return the relative error of each head, for each narrow type."""
    caches = {dtype: make_cache(rule, dtype, num_tokens) for dtype in ("float32", *NARROW)}
    rng, outputs = np.random.default_rng(0), {}
    for cache in caches.values():
        cache.add_sequence(0)
    for _ in range(num_tokens // CHUNK):
        rows = random_rows(rule, rng)
        for dtype, cache in caches.items():
            with cache.forward([0], [CHUNK]):
                outputs[dtype] = cache.recurrent(0, *rows).numpy()[-MEASURED:]
    expected = outputs["float32"]
    size = np.sqrt((expected**2).mean((0, 2)))
    return {x: np.sqrt(((outputs[x] - expected) ** 2).mean((0, 2))) / size for x in NARROW}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rule", choices=RECURRENT_RULES, action="append")
    parser.add_argument("--tokens", type=int, default=4096, help="a multiple of 256")
    options = parser.parse_args()
    if options.tokens < CHUNK or options.tokens % CHUNK:
        parser.error(f"--tokens must be a multiple of {CHUNK}")
    print(f"{options.tokens} tokens; error of outputs by half-life")
    print(f"{'':24}", *(f"{half:>9}" for half in HALF_LIVES))
    for rule in options.rule or ("gated_delta", "mamba2"):
        for dtype, errors in errors_of(rule, options.tokens).items():
            print(f"{rule:12} {dtype:11}", *(f"{error:9.3%}" for error in errors), flush=True)


if __name__ == "__main__":
    main()
