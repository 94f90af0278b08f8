# SPDX-License-Identifier: Apache-2.0
"""A needle in a haystack: is a value found that was placed thousands of tokens back?

A text of random tokens, each of which comes once if the vocabulary suffices, has a marker and
`NEEDLE` random tokens after it at one place, and ends with the marker again. A model that was
trained to copy goes on with the tokens of the needle. They are found when each of them is the most
likely next token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tvm_pagedkv_lm import DecoderModel

NEEDLE = 8
DISTANCES = (256, 1024, 4096, 7680)
SEQUENCE = 0


def needle_texts(
    count: int, length: int, distance: int, vocabulary: int, seed: int
) -> Iterator[np.ndarray]:
    """Make texts int64 ``[length]`` that end with marker and needle, both also `distance` back."""
    rng = np.random.default_rng([seed, distance])
    for _ in range(count):
        marker = rng.integers(vocabulary)
        size = length + NEEDLE
        tokens = rng.choice(vocabulary - 1, size, replace=vocabulary <= size)
        tokens += tokens >= marker  # no other marker
        text, needle = tokens[:length], np.concatenate([[marker], tokens[length:]])
        text[-len(needle) :] = needle
        text[-len(needle) - distance : -distance] = needle
        yield text


def find_needles(
    models: dict[str, DecoderModel],
    count: int,
    length: int,
    chunk: int,
    seed: int,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict]:
    """Look for needles at all distances that fit into `length` tokens, with every model.

    `progress` is called with a line for each text, and with an empty one at the end.

    Returns
    -------
    list of dict
        For each codec and distance the share of needles that are found, and the mean probability
        of their tokens.
    """
    distances = [d for d in DISTANCES if d + NEEDLE + 1 <= length]
    if not distances:
        raise ValueError(f"texts need {DISTANCES[0] + NEEDLE + 1} tokens or more, got {length}")
    results = []
    for name, model in models.items():
        cache = model.create_cache(1, length, chunk)
        for distance in distances:
            found, probabilities = 0, []
            texts = needle_texts(count, length, distance, model.config.vocab_size, seed)
            for number, text in enumerate(texts):
                progress(f"{name}, {distance} tokens back: text {number + 1} of {count}")
                likely = _last_probabilities(model, cache, text, chunk)
                right = likely[np.arange(NEEDLE), text[-NEEDLE:]]
                found += bool(np.all(right == likely.max(-1)))
                probabilities.append(right.mean())
            results.append(
                {
                    "codec": name,
                    "distance": distance,
                    "found": found / count,
                    "probability": float(np.mean(probabilities)),
                    "texts": count,
                }
            )
    progress("")
    return results


def _last_probabilities(model: DecoderModel, cache, text: np.ndarray, chunk: int) -> np.ndarray:
    """Probabilities ``[NEEDLE, vocabulary]`` of the tokens of the second needle."""
    begin = len(text) - NEEDLE - 1
    cache.add_sequence(SEQUENCE)
    for first in range(0, begin, chunk):
        model.logits(cache, [SEQUENCE], [text[first : min(begin, first + chunk)].tolist()])
    logits = model.logits(cache, [SEQUENCE], [text[begin:-1].tolist()])[0].astype(np.float64)
    cache.remove_sequence(SEQUENCE)
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


def print_needles(results: list[dict]) -> None:
    """A line per codec, a column per distance: found, and the probability of the right tokens."""
    distances = sorted({r["distance"] for r in results})
    print(f"{results[0]['texts']} needles of {NEEDLE} tokens: found, mean probability")
    print(f"{'codec':14} " + " ".join(f"{d:>7} back".rjust(16) for d in distances))
    for codec in dict.fromkeys(r["codec"] for r in results):
        rows = {r["distance"]: r for r in results if r["codec"] == codec}
        cells = [f"{rows[d]['found']:7.1%} {rows[d]['probability']:8.4f}" for d in distances]
        print(f"{codec:14} " + " ".join(cells))
