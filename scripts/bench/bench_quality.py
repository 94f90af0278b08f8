# SPDX-License-Identifier: Apache-2.0
"""Quality of quantized caches: perplexity and the next token's distribution, by codec.

Every text runs through the model once for each codec, in steps of `--chunk` tokens and at the same
time through a float32 cache, so that the distributions of all positions are compared. Model
arithmetic is float32 everywhere: only the cache differs.

    python scripts/bench/bench_quality.py                  # the included model
    python scripts/bench/bench_quality.py --model DIR      # any Hugging Face directory
    python scripts/bench/bench_quality.py --model FILE --weights float16:auto float32:int8
    python scripts/bench/bench_quality.py --drift          # attention over 32k positions instead
    python scripts/bench/bench_quality.py --needle --model DIR   # of scripts/tools/train_copy.py

The perplexity's change has the standard error over texts. KL is the divergence of the next token's
distribution from that of the float32 cache, in nats.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from lib.quality.drift import drift_table
from lib.quality.needle import find_needles, print_needles
from lib.quality.texts import TEXTS, windows_of

from tir_kernels.codec import CODECS
from tvm_pagedkv_lm import DecoderModel

SEQUENCE = 0


class Comparison:
    """Sums over the texts of what one codec changes.

    Parameters
    ----------
    codec : str
    """

    def __init__(self, codec: str):
        self.codec = codec
        self.changes: list[float] = []  # of the mean negative log-likelihood of each text, in nats
        self.divergences: list[np.ndarray] = []
        self.same_token = 0

    def add(self, expected: np.ndarray, actual: np.ndarray, targets: np.ndarray) -> float:
        """Compare log-probabilities float64 ``[n, vocab]``; return the summed change of the NLL."""
        rows = np.arange(len(targets))
        self.divergences.append(np.sum(np.exp(expected) * (expected - actual), axis=-1))
        self.same_token += int(np.sum(expected.argmax(-1) == actual.argmax(-1)))
        return float(np.sum(expected[rows, targets] - actual[rows, targets]))

    def result(self, perplexity: float) -> dict:
        """Return what the table and the JSON file show."""
        changes, divergences = np.array(self.changes), np.concatenate(self.divergences)
        error = changes.std(ddof=1) / np.sqrt(len(changes)) if len(changes) > 1 else np.nan
        return {
            "codec": self.codec,
            "perplexity": perplexity * float(np.exp(changes.mean())),
            "change": float(np.expm1(changes.mean())),
            "standard_error": float(error),
            "mean_kl": float(divergences.mean()),
            "kl_99.9": float(np.quantile(divergences, 0.999)),
            "same_token": self.same_token / len(divergences),
            "tokens": len(divergences),
        }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities in float64."""
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def compare(models: dict[str, DecoderModel], texts: list[list[int]], chunk: int) -> list[dict]:
    """Run the texts through all models; the one named "float32" is what the others are held to."""
    comparisons = [Comparison(name) for name in models if name != "float32"]
    longest = max(map(len, texts))
    caches = {name: model.create_cache(1, longest, chunk) for name, model in models.items()}
    total, count = 0.0, 0
    for number, text in enumerate(texts):
        show(f"text {number + 1} of {len(texts)}, {len(text)} tokens")
        for cache in caches.values():
            cache.add_sequence(SEQUENCE)
        changes = np.zeros(len(comparisons))
        for begin in range(0, len(text) - 1, chunk):
            targets = np.array(text[begin + 1 : begin + 1 + chunk])
            step = text[begin : begin + len(targets)]
            logits = {
                name: log_softmax(model.logits(caches[name], [SEQUENCE], [step])[0])
                for name, model in models.items()
            }
            expected = logits["float32"]
            total -= float(expected[np.arange(len(targets)), targets].sum())
            count += len(targets)
            for i, each in enumerate(comparisons):
                changes[i] += each.add(expected, logits[each.codec], targets)
        for each, change in zip(comparisons, changes, strict=True):
            each.changes.append(change / (len(text) - 1))
        for cache in caches.values():
            cache.remove_sequence(SEQUENCE)
    show("")
    perplexity = float(np.exp(total / count))
    print(f"float32 cache: perplexity {perplexity:.4f} over {count} tokens of {len(texts)} texts")
    return [each.result(perplexity) for each in comparisons]


def print_table(results: list[dict]) -> None:
    """A line per codec."""
    print(
        f"{'codec':14} {'perplexity':>11} {'change':>9} {'+-':>8} {'mean KL':>9} {'99.9 %':>9} "
        f"{'same token':>11}"
    )
    for r in results:
        print(
            f"{r['codec']:14} {r['perplexity']:11.4f} {r['change']:+9.3%} "
            f"{r['standard_error']:8.3%} {r['mean_kl']:9.2e} {r['kl_99.9']:9.2e} "
            f"{r['same_token']:11.2%}"
        )


def show(line: str) -> None:
    """Progress, on the terminal only."""
    if sys.stderr.isatty():
        print(f"\r{line:70}\r", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: included)")
    parser.add_argument(
        "--text",
        default="sources",
        help=f"{', '.join(TEXTS)}, or a UTF-8 file (default: sources)",
    )
    parser.add_argument("--texts", type=int, default=24, help="number of texts (default 24)")
    parser.add_argument("--length", type=int, help="tokens of a text (default: the model's most)")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a step (default 128)")
    parser.add_argument("--codecs", nargs="+", default=["float16", "bfloat16", *CODECS])
    parser.add_argument(
        "--weights",
        nargs="+",
        metavar="DTYPE:HOW",
        help="compare these weights instead of caches, such as float16:auto float32:int8",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drift", action="store_true", help="errors of attention by context")
    parser.add_argument("--needle", action="store_true", help="find what stood far back")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    if args.drift:
        results = drift_table(args.codecs, args.seed)
    else:
        models = {
            name: DecoderModel.from_pretrained(
                args.model, "float32", kv_dtype=name, weights="float"
            )
            for name in ("float32", *([] if args.weights else args.codecs))
        }
        for name in args.weights or ():
            dtype, _, how = name.partition(":")
            models[name] = DecoderModel.from_pretrained(args.model, dtype, weights=how)
        length = args.length or models["float32"].config.context_length
    if args.needle:
        results = find_needles(models, args.texts, length, args.chunk, args.seed, show)
        print_needles(results)
    elif not args.drift:
        texts = windows_of(args.text, models["float32"], args.texts, length, args.seed)
        results = compare(models, texts, args.chunk)
        print_table(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
