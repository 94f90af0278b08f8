#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Whole generations beside llama.cpp: the same weights, threads and prompt, alternating.

    pip install llama-cpp-python gguf      # here or in an environment of its own, for --python
    python scripts/bench/bench_generate.py --python ENVIRONMENT/bin/python
    python scripts/bench/bench_generate.py --depths 2048 4096 8192 16384   # how decode slows down

The models are random Llamas, of 1.2 billion parameters for generations, and of four layers of the
same shape for depths. With depth, a step of decode reads more K and V: the slope of its time gives
the rate at which they are read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SCRIPTS / "tools"), str(SCRIPTS.parent)]

from random_llama import SHAPE_1B, write_random_llama  # noqa: E402

PEERS = Path(__file__).with_name("generate_peers")
SHAPE_DEPTH = SHAPE_1B | {
    "num_hidden_layers": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 32768,
}
GGUF = {"bfloat16": "bf16", "float16": "f16"}
KV_BITS = {"f16": 16, "bf16": 16, "q8_0": 8.5, "float16": 16, "bfloat16": 16}


class Engine:
    """An engine in a process of its own."""

    def __init__(self, label: str, kv_type: str, command: Sequence[str]):
        self.label, self.kv_type = label, kv_type
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent)},
        )
        self._read()

    def ask(self, tokens: list[int], num_tokens: int) -> dict:
        """Run a prompt; see `worker.serve`."""
        request = {"tokens": tokens, "num_tokens": num_tokens}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise SystemExit(f"{self.label} ended: {self.errors.read()[-2000:]}")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def write_models(folder: Path, name: str, shape: dict, dtypes: Sequence[str], python: str):
    """The directory, and a GGUF file for each dtype; what is there already stays."""
    directory = folder / name
    if not (directory / "model.safetensors").is_file():
        print(f"writing {directory}", flush=True)
        write_random_llama(directory, shape)
    files = {}
    for dtype in dtypes:
        files[dtype] = folder / f"{name}-{GGUF[dtype]}.gguf"
        if not files[dtype].is_file():
            print(f"writing {files[dtype]}", flush=True)
            script = str(PEERS / "write_gguf.py")
            command = [python, script, str(directory), str(files[dtype]), GGUF[dtype]]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory, files


def ours(directory: Path, dtype: str, positions: int) -> Engine:
    command = [sys.executable, str(PEERS / "ours.py"), str(directory), dtype, str(positions)]
    return Engine(f"ours, {dtype}", dtype, command)


def llama_cpp(python: str, file: Path, kv_type: str, positions: int, flash: bool) -> Engine:
    script = str(PEERS / "llama_cpp_peer.py")
    command = [python, script, str(file), kv_type, str(positions), str(int(flash))]
    label = f"llama.cpp, KV {kv_type}{', flash attention' if flash else ''}"
    return Engine(label, kv_type, command)


def generations(options: argparse.Namespace, folder: Path) -> list[dict]:
    """Prefill and decode of each engine, and how much longer the others take than ours."""
    directory, files = write_models(folder, "1b", SHAPE_1B, options.dtypes, options.python)
    prompt = np.random.default_rng(0).integers(0, 256, options.prompt).tolist()
    positions = options.prompt + options.tokens + 64
    records = []
    for dtype in options.dtypes:
        kv_type = GGUF[dtype]
        engines = [
            ours(directory, dtype, positions),
            llama_cpp(options.python, files[dtype], kv_type, positions, False),
            llama_cpp(options.python, files[dtype], kv_type, positions, True),
        ]
        replies: list[list[dict]] = [[] for _ in engines]
        for engine in engines:
            engine.ask(prompt[:64], 4)
        for number in range(options.rounds):
            for engine, said in zip(engines, replies, strict=True):
                said.append(engine.ask(prompt, options.tokens))
            print(f"{dtype}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for engine in engines:
            engine.close()
        for engine, said in zip(engines, replies, strict=True):
            same = [a == b for a, b in zip(said[0]["text"], replies[0][0]["text"], strict=True)]
            records.append(
                {
                    "engine": engine.label,
                    "dtype": dtype,
                    "prefill_tokens_s": options.prompt
                    / statistics.median(reply["prefill_s"] for reply in said),
                    "decode_tokens_s": 1 / statistics.median(s for r in said for s in r["step_s"]),
                    "same_tokens": sum(same),
                }
            )
            record = records[-1]
            first = next(r for r in records if r["dtype"] == dtype)
            print(
                f"{dtype:9} {engine.label:40} prefill {record['prefill_tokens_s']:7.1f} tokens/s "
                f"(ours {first['prefill_tokens_s'] / record['prefill_tokens_s']:4.2f} x), "
                f"decode {record['decode_tokens_s']:6.2f} tokens/s "
                f"(ours {first['decode_tokens_s'] / record['decode_tokens_s']:4.2f} x), "
                f"{record['same_tokens']} of {options.tokens} tokens as ours",
                flush=True,
            )
    return records


def depths(options: argparse.Namespace, folder: Path) -> list[dict]:
    """Seconds of a step of decode at each depth, and GB/s of K and V from their slope."""
    dtype = options.dtypes[0]
    directory, files = write_models(folder, "depth", SHAPE_DEPTH, [dtype], options.python)
    positions = max(options.depths) + options.tokens + 64
    rng = np.random.default_rng(0)
    engines = [
        lambda: ours(directory, dtype, positions),
        lambda: llama_cpp(options.python, files[dtype], "f16", positions, False),
        lambda: llama_cpp(options.python, files[dtype], "f16", positions, True),
        lambda: llama_cpp(options.python, files[dtype], "q8_0", positions, True),
    ]
    values = 2 * SHAPE_DEPTH["num_hidden_layers"] * SHAPE_DEPTH["num_key_value_heads"]
    values *= SHAPE_DEPTH["head_dim"]
    records = []
    for start in engines:
        engine = start()
        engine.ask([1] * 64, 4)
        steps = []
        for depth in options.depths:
            reply = engine.ask(rng.integers(0, 256, depth).tolist(), options.tokens)
            steps.append(statistics.median(reply["step_s"]))
        engine.close()
        slope = float(np.polyfit(options.depths, steps, 1)[0])  # seconds for each position
        rate = values * KV_BITS[engine.kv_type] / 8 / slope / 1e9
        records.append({"engine": engine.label, "step_s": steps, "kv_gb_s": rate})
        shown = ", ".join(
            f"{depth}: {step * 1e3:.2f} ms"
            for depth, step in zip(options.depths, steps, strict=True)
        )
        print(f"{engine.label:40} {shown}; {rate:.1f} GB/s of K and V", flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="of an environment with the peer")
    parser.add_argument("--folder", type=Path, help="keeps the models (default: a temporary one)")
    parser.add_argument("--dtypes", nargs="+", default=list(GGUF), choices=list(GGUF))
    parser.add_argument("--prompt", type=int, default=2000, help="tokens (default 2000)")
    parser.add_argument("--tokens", type=int, default=60, help="to generate (default 60)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--depths", type=int, nargs="+", help="measure decode at these depths")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        records = depths(options, folder) if options.depths else generations(options, folder)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
