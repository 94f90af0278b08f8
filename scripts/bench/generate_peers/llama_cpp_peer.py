# SPDX-License-Identifier: Apache-2.0
"""llama.cpp: ``llama_cpp_peer.py GGUF KV_TYPE NUM_POSITIONS FLASH`` answers as `worker.serve` says.

Needs ``pip install llama-cpp-python``. KV_TYPE is f32, f16, bf16 or q8_0, FLASH is 0 or 1.
"""

import os
import sys
import time

import llama_cpp
import numpy as np
from worker import serve

TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}  # of ggml
CHUNK = 512


class LlamaCpp:
    """A model and its context; one sequence."""

    def __init__(self, file: str, kv_type: str, num_positions: str, flash: str):
        threads = int(os.environ["TVM_NUM_THREADS"])
        self.llama = llama_cpp.Llama(
            file,
            n_ctx=int(num_positions),
            n_batch=CHUNK,
            n_ubatch=CHUNK,
            n_threads=threads,
            n_threads_batch=threads,
            type_k=TYPES[kv_type],
            type_v=TYPES[kv_type],
            flash_attn=flash == "1",
            verbose=False,
        )
        self.vocab_size = self.llama.n_vocab()

    def prefill(self, tokens: list[int]) -> tuple[float, int]:
        """Begin anew; seconds, and the most likely next token."""
        self.llama.reset()
        start = time.perf_counter()
        self.llama.eval(tokens)
        return time.perf_counter() - start, self._most_likely()

    def decode(self, token: int) -> int:
        self.llama.eval([token])
        return self._most_likely()

    def _most_likely(self) -> int:
        logits = llama_cpp.llama_get_logits(self.llama.ctx)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp(*sys.argv[1:]))
