#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""GGUF files with quantized weights: ours beside llama.cpp, the same file, alternating.

    pip install llama-cpp-python gguf      # here or in an environment of its own, for --python
    python scripts/bench/bench_weights.py model.gguf --python ENVIRONMENT/bin/python
    python scripts/bench/bench_weights.py --random Q4_0 --folder /tmp/models

Prints prefill of prompts, and decode after them, in tokens per second: medians over all rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from bench_generate import PEERS, SHAPE_1B, Engine, llama_cpp  # noqa: E402

KINDS = ("Q8_0", "Q4_0", "Q4_1")


def ours(file: Path, weights: str, positions: int) -> Engine:
    """Return our engine, which keeps float16 in its pages as llama.cpp does by default."""
    script = str(PEERS / "ours.py")
    command = [sys.executable, script, str(file), "float16", str(positions), weights]
    return Engine(f"ours, weights {weights}", "float16", command)


def measure(options: argparse.Namespace, file: Path) -> None:
    """Print a line for each prompt and engine."""
    positions = max(options.prompts) + options.tokens + 64
    engines = [ours(file, weights, positions) for weights in options.weights]
    engines += [llama_cpp(options.python, file, "f16", positions, bool(f)) for f in options.flash]
    rng = np.random.default_rng(0)
    for engine in engines:
        engine.ask([1] * 64, 4)
    for prompt in options.prompts:
        tokens = rng.integers(3, 256, prompt).tolist()
        replies: list[list[dict]] = [[] for _ in engines]
        for _ in range(options.rounds):
            for engine, said in zip(engines, replies, strict=True):
                said.append(engine.ask(tokens, options.tokens))
        rates = []
        for engine, said in zip(engines, replies, strict=True):
            prefill = prompt / statistics.median(reply["prefill_s"] for reply in said)
            decode = 1 / statistics.median(s for reply in said for s in reply["step_s"])
            rates.append((prefill, decode))
            print(
                f"{file.name:34} {engine.label:36} prompt {prompt:5}: prefill {prefill:7.1f}, "
                f"decode {decode:6.2f} tokens/s (ours {rates[0][0] / prefill:4.2f} x, "
                f"{rates[0][1] / decode:4.2f} x)",
                flush=True,
            )
    for engine in engines:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="GGUF files")
    parser.add_argument("--random", nargs="+", default=[], choices=KINDS, help="of 1.2B parameters")
    parser.add_argument("--python", default=sys.executable, help="of an environment with the peer")
    parser.add_argument("--folder", type=Path, help="keeps the models (default: a temporary one)")
    parser.add_argument("--weights", nargs="+", default=["auto"], help="ours (default auto)")
    parser.add_argument("--flash", nargs="*", type=int, default=[0, 1], help="flash attention")
    parser.add_argument("--prompts", nargs="+", type=int, default=[4, 512, 4096])
    parser.add_argument("--tokens", type=int, default=24, help="to generate (default 24)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in options.random:
            from generate_peers.random_gguf import write_random_gguf

            file = folder / f"random-1.2b-{kind}.gguf"
            if not file.is_file():
                shape = SHAPE_1B | {"max_position_embeddings": 32768}
                write_random_gguf(file, shape, kind)
            options.files.append(file)
        for file in options.files:
            measure(options, file)


if __name__ == "__main__":
    main()
