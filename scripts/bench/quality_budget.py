#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What a budget of positions costs in quality: perplexity of the included model, by budget.

Texts begin with a prompt, to which attention is whole; then every token is a decode step, which
attends within the budget. The layers run in NumPy, but for attention. The model has a context of
512 tokens of a byte each, so this shows that bounds choose well, and not what a large model loses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

import tvm_pagedkv as pkv  # noqa: E402
from tvm_pagedkv.models import hub  # noqa: E402

HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 32, 4


class Model:
    """The included model, whose attention is that of a cache."""

    def __init__(self):
        from safetensors import safe_open

        folder = Path(hub.__file__).with_name("tiny")
        with safe_open(folder / "model.safetensors", "pt") as file:
            self.weights = {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118
        self.tokenizer_file = str(folder / "tokenizer.json")

    def cache(self, num_texts: int, length: int, page_size: int):
        config = pkv.KVCacheConfig(
            num_layers=LAYERS,
            num_qo_heads=HEADS,
            num_kv_heads=KV_HEADS,
            qk_head_dim=DIM,
            dtype="float32",
            page_size=page_size,
            max_num_sequences=num_texts,
            max_total_tokens=num_texts * (length + page_size),
            prefill_chunk_size=num_texts * length,
            layers=[pkv.LayerSpec(page_bounds=True)] * LAYERS,
        )
        return pkv.create(config)

    def logits(self, cache, tokens: np.ndarray, budget: int | None) -> np.ndarray:
        """The logits of the rows of a step that has begun."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(LAYERS):
            w = self._weights_of(layer)
            y = _norm(x, w("input_layernorm"))
            qkv = [y @ w(f"self_attn.{name}_proj").T for name in "qkv"]
            rows = np.concatenate(qkv, axis=1).reshape(len(tokens), -1, DIM)
            o = cache.attention(layer, rows.astype("float32"), budget=budget).numpy()
            x = x + o.reshape(len(tokens), -1) @ w("self_attn.o_proj").T
            y = _norm(x, w("post_attention_layernorm"))
            gate = y @ w("mlp.gate_proj").T
            gate = gate / (1 + np.exp(-gate)) * (y @ w("mlp.up_proj").T)
            x = x + gate @ w("mlp.down_proj").T
        x = _norm(x, self.weights["model.norm.weight"])
        return x @ self.weights["model.embed_tokens.weight"].T

    def _weights_of(self, layer: int):
        return lambda name: self.weights[f"model.layers.{layer}.{name}.weight"]


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def losses(
    model: Model, texts: np.ndarray, prompt: int, page_size: int, budget: int | None
) -> np.ndarray:
    """Losses ``[texts, tokens behind the prompt]``, in nats."""
    num_texts, length = texts.shape
    cache, ids, found = model.cache(num_texts, length, page_size), [*range(num_texts)], []
    for seq_id in ids:
        cache.add_sequence(seq_id)
    with cache.forward(ids, [prompt] * num_texts):
        model.logits(cache, texts[:, :prompt].reshape(-1), None)
    for at in range(prompt, length - 1):
        with cache.forward(ids, [1] * num_texts):
            logits = model.logits(cache, texts[:, at], budget).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        chosen = np.take_along_axis(logits, texts[:, at + 1, None], axis=1)[:, 0]
        found.append(np.log(np.exp(logits).sum(-1)) - chosen)
    return np.stack(found, axis=1)


def table(
    texts: np.ndarray, prompt: int, page_size: int, budgets: Sequence[int]
) -> list[tuple[int | None, float, float]]:
    """Print and return budgets, perplexities and their changes from whole attention.

    Changes are printed with their standard error over texts.
    """
    model, rows, whole = Model(), [], None
    for budget in (None, *budgets):
        found = losses(model, texts, prompt, page_size, budget)
        whole = found if whole is None else whole
        changes = (found - whole).mean(axis=1)
        error = changes.std(ddof=1) / np.sqrt(len(texts)) if len(texts) > 1 else float("nan")
        perplexity, change = float(np.exp(found.mean())), float(np.expm1(changes.mean()))
        rows.append((budget, perplexity, change))
        print(
            f"{'all' if budget is None else budget:>6} positions: perplexity {perplexity:.4f}, "
            f"{change:+.3%} +- {error:.3%}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default="sources", help="as for bench_quality.py")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 128, 64, 32])
    arguments = parser.parse_args()
    from quality_texts import windows_of
    from tokenizers import Tokenizer

    tokenizer = SimpleNamespace(tokenizer=Tokenizer.from_file(Model().tokenizer_file))
    windows = windows_of(arguments.text, tokenizer, arguments.texts, arguments.length, seed=0)
    table(np.array(windows), arguments.prompt, arguments.page_size, arguments.budgets)


if __name__ == "__main__":
    main()
