# SPDX-License-Identifier: Apache-2.0
"""Ours: ``ours.py MODEL DTYPE NUM_POSITIONS [WEIGHTS]`` answers as `worker.serve` says."""

import sys
import time

from worker import serve

from tvm_pagedkv_lm import DecoderModel

CHUNK = 512


class Ours:
    """A model and its cache; one sequence."""

    def __init__(self, model: str, dtype: str, num_positions: str, weights: str = "auto"):
        self.model = DecoderModel.from_pretrained(model, dtype, weights=weights)
        self.cache = self.model.create_cache(1, int(num_positions), CHUNK)

    def prefill(self, tokens: list[int]) -> tuple[float, int]:
        """Begin anew; seconds, and the most likely next token."""
        self.cache.clear()
        self.cache.add_sequence(0)
        start = time.perf_counter()
        for begin in range(0, len(tokens), CHUNK):
            logits = self.model.prefill(self.cache, [0], [tokens[begin : begin + CHUNK]])
        return time.perf_counter() - start, int(logits[0].argmax())

    def decode(self, token: int) -> int:
        return int(self.model.decode(self.cache, [0], [token])[0].argmax())


if __name__ == "__main__":
    serve(Ours(*sys.argv[1:]))
