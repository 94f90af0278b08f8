# SPDX-License-Identifier: Apache-2.0
"""Distance of attention over a long, quantized context from float64, by codec and context."""

from __future__ import annotations

import numpy as np
import tvm

import tvm_pagedkv as pkv

CONTEXTS = (1024, 4096, 16384, 32768)
HEADS, KV_HEADS, DIM, CHUNK = 8, 2, 128, 2048
OUTLIER = 12.0  # of one column of K: what RoPE leaves of a bias


def drift_table(codecs: list[str], seed: int) -> list[dict]:
    """Print a line per codec; return its relative errors.

    The error of a codec is the norm of what it changes in the outputs of a decode step, over the
    norm of the outputs: float64 attention over the rows as they were appended. That of the
    arithmetic is over the rows as the cache gives them back: it must not grow with the context.
    """
    rng = np.random.default_rng(seed)
    shape = (CONTEXTS[-1], KV_HEADS, DIM)
    k, v = (rng.standard_normal(shape).astype("float32") for _ in range(2))
    k[..., 5] += OUTLIER
    queries = 2 * rng.standard_normal((len(CONTEXTS), HEADS, DIM)).astype("float32")
    print(f"seed {seed}; relative errors of the output against float64: codec (arithmetic alone)")
    print(f"{'codec':14}" + "".join(f"{context:>22}" for context in CONTEXTS))
    results = []
    for codec in ("float32", *codecs):
        cells = _errors(codec, k, v, queries)
        print(f"{codec:14}" + "".join(f"{c['codec']:12.1e} ({c['arithmetic']:.1e})" for c in cells))
        results.append({"codec": codec, "errors": cells})
    return results


def _errors(codec: str, k: np.ndarray, v: np.ndarray, queries: np.ndarray) -> list[dict]:
    config = pkv.KVCacheConfig(
        num_layers=1,
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        qk_head_dim=DIM,
        dtype="float32",
        kv_dtype=codec,
        max_num_sequences=1,
        max_total_tokens=CONTEXTS[-1],
        prefill_chunk_size=CHUNK,
        rope=pkv.RopeConfig(mode="none"),
    )
    cache, errors = pkv.create(config), []
    cache.add_sequence(0)
    for context, q in zip(CONTEXTS, queries, strict=True):
        _append(cache, k, v, context - 1)
        row = np.concatenate([q, k[context - 1], v[context - 1]])[None]
        with cache.forward([0], [1]):
            out = cache.attention(0, tvm.runtime.tensor(row)).numpy()[0]
        kept = [np.asarray(rows.numpy()) for rows in cache.debug_get_kv(0, 0, context)]
        kept_k, kept_v = (rows.reshape(-1, *rows.shape[-2:])[-context:] for rows in kept)
        errors.append(
            {
                "context": context,
                "codec": _error(out, _attention(q, k[:context], v[:context])),
                "arithmetic": _error(out, _attention(q, kept_k, kept_v)),
            }
        )
    return errors


def _append(cache, k: np.ndarray, v: np.ndarray, until: int) -> None:
    while (begin := cache.sequence_length(0)) < until:
        end = min(until, begin + CHUNK)
        q = np.zeros((end - begin, HEADS, DIM), "float32")
        rows = np.concatenate([q, k[begin:end], v[begin:end]], axis=1)
        with cache.forward([0], [end - begin]):
            cache.attention(0, tvm.runtime.tensor(rows))


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Outputs of one row in float64: ``[HEADS, DIM]``."""
    group, scale = HEADS // KV_HEADS, DIM**-0.5
    out = np.empty((HEADS, DIM))
    for head in range(HEADS):
        logits = k[:, head // group].astype("float64") @ q[head].astype("float64") * scale
        weights = np.exp(logits - logits.max())
        out[head] = weights / weights.sum() @ v[:, head // group].astype("float64")
    return out


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
