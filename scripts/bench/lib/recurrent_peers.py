# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of other projects on CPUs, beside ours: the calls alternate."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

# ik_llama.cpp's function does the part of one of several threads. Others in its file use the array.
_RUN = """
#include <omp.h>
#include "iqk_mul_mat.h"
extern "C" float ggml_table_f32_f16[1 << 16] = {};
extern "C" void run(int threads, int heads, int group, int tokens, int sequences, const float* q,
                    const float* k, const float* v, const float* g, const float* beta,
                    float* states, float* o) {
  const size_t head = 128, token = heads * head;
#pragma omp parallel num_threads(threads)
  iqk_fused_delta_net(128, heads, group, 0, tokens, sequences, token, head, tokens * token, q, k, v,
                      g, beta, states, o, states, nullptr, 0, omp_get_thread_num(), threads);
}
"""


def beside(bench, batches: Iterable[int], num_rows: int, rounds: int, ik_llama: str | None) -> None:
    """Print times of decode for some batches and of a prefill, ours and those of the peer.

    States are as many, and float32 in the peer. What it takes as rows, such as heads of K and Q
    that it wants repeated, or as float32, is given.

    Parameters
    ----------
    bench : Bench
        Kernels of the gated delta rule, and a pool of states.
    batches : iterable of int
        Numbers of states of a decode step.
    num_rows : int
        Tokens of the prefill.
    rounds : int
    ik_llama : str, optional
        Folder with the sources of ik_llama.cpp; None: beside transformers.
    """
    make, name = (_ik_llama(ik_llama), "ik_llama.cpp") if ik_llama else (_transformers, "torch")
    cases = [(f"decode {n:3} sequences", n, 1) for n in batches]
    for case, batch, rows in [*cases, (f"prefill {num_rows:5} tokens ", 1, num_rows)]:
        first = range(0, bench.num_states - batch + 1, batch) if rows == 1 else [0]
        steps = [bench.arguments(rows, list(range(i, i + batch))) for i in first]
        theirs = make(bench, batch, rows)
        times: tuple[list[float], list[float]] = [], []
        for _ in range(rounds):
            start = time.perf_counter()
            for step in steps:
                bench.scan(*step)
            times[0].append(time.perf_counter() - start)
            time.sleep(0.02)  # threads of one library still wait for work when the other's begin
            start = time.perf_counter()
            for i in first:
                theirs(i)
            times[1].append(time.perf_counter() - start)
            time.sleep(0.02)
        ours, peer = (min(each) / len(steps) for each in times)
        print(f"{case}  {ours * 1e6:9.1f} us, {name} {peer * 1e6:9.1f} us: {peer / ours:.1f} x")


def _transformers(bench, batch: int, rows: int) -> Callable[[int], object]:
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    torch.set_num_threads(bench.num_threads)
    rule = modeling.torch_recurrent_gated_delta_rule
    if rows > 1:
        rule = modeling.torch_chunk_gated_delta_rule
    spec = bench.spec
    shape = (bench.num_states, *spec.state_shape)
    states = torch.zeros(shape) if spec.state_dtype != "float32" else bench.array.reshape(shape)
    states, dtype = torch.as_tensor(states), getattr(torch, spec.dtype)
    heads = batch, rows, spec.num_heads
    q, k = (torch.randn(*heads, spec.key_dim, dtype=dtype) for _ in range(2))
    v = torch.randn(*heads, spec.value_dim, dtype=dtype)
    g, beta = -torch.rand(heads), torch.rand(heads)

    def run(first: int) -> None:
        with torch.no_grad():
            rule(q, k, v, g, beta, initial_state=states[first : first + batch],
                 output_final_state=True, use_qk_l2norm_in_kernel=True)  # fmt: skip

    return run


def _ik_llama(sources: str) -> Callable:
    """Compile the one file of ik_llama.cpp that has its gated delta rule.

    It also calls functions of other files, which stay unresolved: nothing here gets there.
    """
    ggml = Path(sources) / "ggml"
    scratch = tempfile.TemporaryDirectory()
    folder = Path(scratch.name)
    (folder / "run.cc").write_text(_RUN)
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O3", "-march=native", "-DNDEBUG"]
    command += ["-DGGML_USE_IQK_MULMAT", "-fopenmp", "-fPIC", "-shared", "-Wl,-z,lazy"]
    command += [f"-I{ggml / 'include'}", f"-I{ggml / 'src'}", f"-I{ggml / 'src' / 'iqk'}"]
    command += [str(folder / "run.cc"), str(ggml / "src" / "iqk" / "iqk_mul_mat.cpp")]
    subprocess.run([*command, "-o", str(folder / "run.so")], check=True)
    load = ctypes.CDLL(None).dlopen
    load.restype = ctypes.c_void_p
    handle = load(str(folder / "run.so").encode(), os.RTLD_LAZY)
    function = ctypes.CDLL("", handle=handle).run
    scratch.cleanup()  # what is loaded stays

    def make(bench, batch: int, rows: int) -> Callable[[int], object]:
        spec, rng = bench.spec, np.random.default_rng(0)
        if spec.key_dim != 128 or spec.value_dim != 128:
            raise ValueError("the kernel of ik_llama.cpp is for heads of 128 x 128")

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32)

        q, k = (normal(batch, spec.num_key_heads, rows, 128) for _ in range(2))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        v, o = (
            normal(batch, rows, spec.num_heads, 128),
            np.zeros(batch * rows * spec.num_heads * 128, "float32"),
        )
        g, beta = (-rng.random((batch, rows, spec.num_heads), np.float32) for _ in range(2))
        states = bench.array
        if spec.state_dtype != "float32":
            states = np.zeros(bench.array.size, np.float32)
        size = states.nbytes // bench.num_states

        def run(first: int) -> None:
            arrays = [x.ctypes.data for x in (q, k, v, g, beta)]
            arrays += [states.ctypes.data + first * size, o.ctypes.data]
            function(
                bench.num_threads, spec.num_heads, spec.heads_per_key, rows, batch,
                *map(ctypes.c_void_p, arrays),
            )  # fmt: skip

        return run

    return make
