# SPDX-License-Identifier: Apache-2.0
"""Record the structure of the kernels, and compare it after a change that must not alter it.

    python scripts/tools/kernel_hashes.py record before.json
    python scripts/tools/kernel_hashes.py compare before.json
    python scripts/tools/kernel_hashes.py compare before.json --only cuda-mla --kernel mla_tree
    python scripts/tools/kernel_hashes.py record before.json --level code

A hash covers the structure of a kernel's TIR, types, shapes, constants and attributes included. The
names of variables and buffers do not count. Specs whose names begin with "lm-" are the kernels of
the language models for a target. With `--level code` it covers the assembly that LLVM
makes for a CPU of the spec's kind, and for GPUs the generated CUDA, but for its variables' names:
kernels that are written otherwise may compile to the same code. `compare` exits with 1 if a kernel
differs, is missing or is new. `show` prints a kernel as TVMScript or code, to compare two trees
with diff.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import tvm
import tvm_ffi
from tvm.target import Target

import tir_kernels
from tir_kernels.conv_spec import ConvSpec
from tir_kernels.cpu.attention import stock_sliding
from tir_kernels.recurrent_spec import RecurrentSpec
from tir_kernels.spec import CudaTarget, KernelSpec, RopeSpec, VectorTarget
from tvm_pagedkv.compiler.cuda.source import cuda_source
from tvm_pagedkv.compiler.lowering import compile_kernel

sys.path.insert(0, str(Path(__file__).parent))  # spawned processes know only the file
from lm_kernels import LmKernels  # noqa: E402

F32, F16, BF16 = "float32", "float16", "bfloat16"
AVX512 = VectorTarget()
AVX512_BF16 = VectorTarget(has_bf16_dot=True)
AVX512_VNNI = VectorTarget(has_vnni=True)
AVX2 = VectorTarget(lanes=8, registers=16)
AVX2_WORDS = VectorTarget(lanes=8, registers=16, has_word_dot=True)
SSE = VectorTarget(lanes=4, registers=16, has_f16_convert=False)
NEON = VectorTarget(lanes=4, registers=32)
NEON_DOT = VectorTarget(lanes=4, registers=32, has_sdot=True)
GPU = CudaTarget()

_TREE = Path(tir_kernels.__file__).parent  # the installed kernels, unless PYTHONPATH says other

_LLAMA3 = (
    ("factor", 8.0),
    ("high_freq_factor", 4.0),
    ("low_freq_factor", 1.0),
    ("original_max_position_embeddings", 8192),
    ("rope_type", "llama3"),
)
_YARN = (("factor", 4.0), ("original_max_position_embeddings", 32), ("rope_type", "yarn"))
_LONGROPE = (
    ("long_factor", tuple(2.0 + i for i in range(16))),
    ("original_max_position_embeddings", 40),
    ("rope_type", "longrope"),
    ("short_factor", tuple(1.0 + i / 8 for i in range(16))),
)


def _spec(heads, dims, dtypes=(F32, F32), page=16, target=AVX512, **fields) -> KernelSpec:
    qk, v = dims if isinstance(dims, tuple) else (dims, dims)
    fields.setdefault("rope", RopeSpec(rotary_dim=qk))
    return KernelSpec(*heads, qk, v, *dtypes, page_size=page, target=target, **fields)


def _mla(heads, dims, dtypes=(BF16, BF16), page=16, target=AVX512_BF16) -> KernelSpec:
    original = (dims[0] // 4 + 64, dims[0] // 4)
    return replace(
        _spec((heads, 1), dims, dtypes, page, target, rope=RopeSpec(rotary_dim=0), kind="mla"),
        original_qk_head_dim=original[0],
        original_v_head_dim=original[1],
    )


_ALIBI = {"alibi_slopes": tuple(2.0**-i for i in range(1, 9))}

CPU_SPECS = {
    "llama-f32": _spec((32, 8), 128),
    "llama-bf16": _spec((32, 8), 128, (BF16, BF16), target=AVX512_BF16),
    "llama-bf16-plain": _spec((32, 8), 128, (BF16, BF16)),
    "llama-f16": _spec((32, 8), 128, (F16, F16)),
    "llama-avx2": _spec((32, 8), 128, (F16, F16), target=AVX2),
    "llama-sse": _spec((32, 8), 128, target=SSE),
    "llama-neon": _spec((32, 8), 128, (BF16, BF16), target=NEON),
    "page-1": _spec((32, 8), 128, (F16, F16), 1),
    "page-256": _spec((71, 1), 64, (F16, F32), 256),
    "group-5": _spec((5, 1), 80, (F32, BF16), 4),
    "group-3-f16-pages": _spec((6, 2), 104, (F32, F16), 64),
    "wide-heads": _spec((7, 1), 576, (BF16, F32), 2, AVX512_BF16),
    "narrow-heads": _spec((2, 2), 8, page=8),
    "mixed-types": _spec((16, 2), 96, (F16, BF16), 32, AVX2),
    "dim-24": _spec((3, 1), 24, (BF16, BF16), 128, AVX512_BF16),
    "dim-512": _spec((1, 1), 512, (BF16, F16), target=NEON),
    "dim-256": _spec((2, 1), 256, (BF16, BF16), 8, AVX512_BF16),
    "different-v": _spec((4, 4), (192, 128), (BF16, BF16), target=AVX512_BF16),
    "yarn": _spec((4, 2), 96, (BF16, BF16), 64, rope=RopeSpec(1e4, 1.0, 96, _YARN)),
    "llama3": _spec((8, 2), 64, (F16, F16), rope=RopeSpec(5e5, 1.0, 64, _LLAMA3)),
    "longrope": _spec((4, 2), 32, rope=RopeSpec(1e4, 1.0, 32, _LONGROPE)),
    "partial-rope": _spec((5, 1), 80, (F32, F32), 1, rope=RopeSpec(5e5, 0.25, 20)),
    "odd-pairs": _spec((4, 2), 64, (BF16, BF16), 2, AVX512_BF16, rope=RopeSpec(rotary_dim=22)),
    "no-rope": _spec((4, 2), 64, (F16, F16), rope=RopeSpec(rotary_dim=0)),
    "softcap": _spec((8, 4), 128, (BF16, BF16), target=AVX512_BF16, logit_softcap=50.0),
    "alibi": _spec((8, 8), 64, (F32, F32), **_ALIBI),
    "sliding": _spec((8, 4), 128, (BF16, BF16), target=AVX512_BF16, kind="mha_sliding"),
    "sliding-alibi": _spec((8, 2), 64, target=AVX2, kind="mha_sliding", **_ALIBI),
    "sinks": _spec((64, 8), 64, (BF16, BF16), target=AVX512_BF16, sink_logits=True),
    "int8": _spec((32, 8), 128, (F16, "int8"), target=AVX512_VNNI),
    "int8-bf16": _spec((8, 2), 80, (BF16, "int8"), 4, AVX512_BF16),
    "float8-avx2": _spec((8, 2), 128, (F16, "float8_e4m3fn"), target=AVX2),
    "int5": _spec((8, 2), 64, (F16, "int5"), target=AVX512_VNNI),
    "int5-avx2": _spec((5, 1), 96, (F32, "int5"), 4, AVX2),
    "int4": _spec((8, 2), 96, (F16, "int4"), target=AVX512_VNNI),
    "int8-words": _spec((32, 8), 128, (F16, "int8"), target=AVX2_WORDS),
    "int4-words": _spec((8, 2), 96, (F16, "int4"), target=AVX2_WORDS),
    "int4-neon": _spec((5, 1), 64, (F32, "int4"), 1, NEON),
    "int8-neon": _spec((8, 2), 128, (F16, "int8"), target=NEON_DOT),
    "mla-int8": _mla(16, (512, 64), (BF16, "int8")),
    "mla-int4": _mla(5, (64, 32), (F32, "int4"), 4, AVX2),
    "mla-bf16": _mla(16, (512, 64)),
    "mla-f32": _mla(5, (64, 16), (F32, F32), 4, AVX2),
    "mla-f16": _mla(128, (512, 64), (F16, F16), 64, NEON),
    "mla-sliding": replace(_mla(16, (512, 64)), kind="mla_sliding"),
}
CUDA_SPECS = {
    "llama-f16": _spec((32, 8), 128, (F16, F16), target=GPU),
    "llama-bf16": _spec((32, 8), 128, (BF16, BF16), target=GPU),
    "llama-f32": _spec((32, 8), 128, target=GPU),
    "page-1": _spec((32, 8), 128, (F16, F16), 1, GPU),
    "page-256": _spec((71, 1), 64, (F16, F32), 256, GPU),
    "group-5": _spec((5, 1), 80, (F32, BF16), 4, GPU),
    "group-3-f16-pages": _spec((6, 2), 104, (F32, F16), 64, GPU),
    "narrow-heads": _spec((2, 2), 8, page=8, target=GPU),
    "dim-24": _spec((3, 1), 24, (BF16, BF16), 128, GPU),
    "dim-256": _spec((2, 1), 256, (BF16, BF16), 8, GPU),
    "dim-512": _spec((1, 1), 512, (BF16, BF16), target=GPU),
    "different-v": _spec((4, 4), (192, 128), (BF16, BF16), target=GPU),
    "group-64": _spec((64, 1), 128, (F16, F16), target=GPU),
    "large-memory": _spec((32, 8), 256, (F16, F16), target=CudaTarget(max_shared_bytes=227 * 1024)),
    "yarn": _spec((4, 2), 96, (BF16, BF16), 64, GPU, rope=RopeSpec(1e4, 1.0, 96, _YARN)),
    "longrope": _spec((4, 2), 32, (F16, F16), target=GPU, rope=RopeSpec(1e4, 1.0, 32, _LONGROPE)),
    "partial-rope": _spec((5, 1), 80, (F32, F32), 1, GPU, rope=RopeSpec(5e5, 0.25, 20)),
    "no-rope": _spec((4, 2), 64, (F16, F16), target=GPU, rope=RopeSpec(rotary_dim=0)),
    "softcap": _spec((8, 4), 128, (BF16, BF16), target=GPU, logit_softcap=50.0),
    "alibi": _spec((8, 8), 64, (F16, F16), target=GPU, **_ALIBI),
    "alibi-softcap-f32": _spec((8, 2), 64, target=GPU, logit_softcap=30.0, **_ALIBI),
    "sliding": _spec((8, 4), 128, (BF16, BF16), target=GPU, kind="mha_sliding"),
    "sliding-f32": _spec((8, 2), 64, target=GPU, kind="mha_sliding"),
    "sliding-alibi": _spec((8, 2), 64, (F16, F16), target=GPU, kind="mha_sliding", **_ALIBI),
    "sinks": _spec((64, 8), 64, (BF16, BF16), target=GPU, sink_logits=True),
    "mla-bf16": _mla(16, (512, 64), target=GPU),
    "mla-f32": _mla(5, (64, 16), (F32, F32), 4, GPU),
    "mla-f16": _mla(128, (512, 64), (F16, F16), 64, GPU),
    "mla-mixed": _mla(8, (256, 32), (F16, BF16), 16, GPU),
    "int8": _spec((32, 8), 128, (F16, "int8"), target=GPU),
    "int8-f32": _spec((5, 1), 80, (F32, "int8"), 4, GPU),
    "int4": _spec((32, 8), 128, (BF16, "int4"), target=GPU),
    "int4-wide-heads": _spec((8, 2), 256, (F16, "int4"), target=GPU),
    "float8-sliding": _spec(
        (8, 2), 128, (BF16, "float8_e4m3fn"), target=GPU, kind="mha_sliding", **_ALIBI
    ),
    "mla-int8": _mla(16, (512, 64), (BF16, "int8"), target=GPU),
    "mla-int4": _mla(5, (64, 32), (F16, "int4"), 4, GPU),
    "mla-sliding": replace(_mla(16, (512, 64), target=GPU), kind="mla_sliding"),
}
RECURRENT_SPECS = {
    "gated-delta": RecurrentSpec("gated_delta", 4, 2, 128, 128, BF16, target=AVX512_BF16),
    "gated-delta-16-bit": RecurrentSpec(
        "gated_delta", 4, 2, 128, 128, BF16, target=AVX512_BF16, state_dtype=BF16
    ),
    "kda-avx2": RecurrentSpec("kda", 6, 1, 7, 20, F16, 1, AVX2),
    "mamba2-neon": RecurrentSpec("mamba2", 3, 3, 24, 8, F32, 4, NEON),
    "conv": ConvSpec(1040, 4, BF16, "silu", target=AVX512_BF16),
    "conv-sse": ConvSpec(140, 3, F32, None, True, 4, SSE),
}
SPECS = {f"cpu-{name}": spec for name, spec in CPU_SPECS.items()} | {
    f"cuda-{name}": spec for name, spec in CUDA_SPECS.items()
}
for _name, _recurrent in RECURRENT_SPECS.items():
    SPECS |= {f"cpu-{_name}": _recurrent, f"cuda-{_name}": replace(_recurrent, target=GPU)}
_LM_TARGETS = {
    "avx512": VectorTarget(has_bf16_dot=True, has_vnni=True),
    "avx2": AVX2,
    "avx2-words": AVX2_WORDS,
    "sse": SSE,
    "neon": NEON,
    "amx": VectorTarget(has_bf16_dot=True, has_vnni=True, has_amx=True),
    "cuda": GPU,
}
SPECS |= {f"lm-{name}": LmKernels(target) for name, target in _LM_TARGETS.items()}


def builders(spec: KernelSpec | LmKernels) -> dict:
    """Name -> function that builds the kernel, for all kernels of a spec."""
    if isinstance(spec, LmKernels):
        return spec.builders()
    names = tir_kernels.kernel_names(spec, for_stock=True)
    found = {name: functools.partial(tir_kernels.build_kernel, name, spec) for name in names}
    if isinstance(spec.target, VectorTarget) and getattr(spec, "kind", "") == "mha_sliding":
        for build in (stock_sliding.decode_sliding, stock_sliding.prefill_sliding):
            found[f"stock_{build.__name__}"] = functools.partial(build, spec, 24)
    return found


# Of an assembly: labels and comments that refer to source, and sections with names.
_DEBUG_INFORMATION = re.compile(
    r"^\s*(?:\.Ltmp\d+:|\.loc\s.*|\.cfi_.*|[#/]+DEBUG.*|[#/]+ .*)\n"
    r"|\s*(?:#|//) .*$"
    r"|^\s*\.section\s+\.debug_(?:.*\n)*",
    re.MULTILINE,
)


def llvm_target(target: VectorTarget) -> Target:
    """A CPU that has what a vector target says."""
    if target in (NEON, NEON_DOT):
        return Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"})
    cpus = {16: "znver4", 8: "x86-64-v3", 4: "x86-64-v2"}
    return Target({"kind": "llvm", "mcpu": cpus[target.lanes]})


def code(function, spec: KernelSpec | LmKernels) -> str:
    """The assembly of a kernel, or its CUDA without the names of variables."""
    if isinstance(spec, LmKernels) and isinstance(spec.target, VectorTarget):
        module = tvm.IRModule({"kernel": function.with_attr("global_symbol", "kernel")})
        built = tvm.tirx.build(module, target=llvm_target(spec.target))
        return _DEBUG_INFORMATION.sub("", built.inspect_source("asm"))
    if isinstance(spec.target, VectorTarget):
        module = compile_kernel(function, "kernel", llvm_target(spec.target))
        return _DEBUG_INFORMATION.sub("", module.inspect_source("asm"))
    numbers: dict[str, int] = {}

    def number(match: re.Match) -> str:
        if match["text"]:
            return match["text"]
        return f"v{numbers.setdefault(match['name'], len(numbers))}"

    text = r'(?P<text>"(?:[^"\\]|\\.)*"|#include .*|//.*)'
    names = re.compile(text + r"|(?P<name>\b[A-Za-z_]\w*\b(?!\())")
    # Names before the kernels, of headers and in comments would be taken for those of variables.
    before, begin, kernels = cuda_source({"kernel": function}).partition('extern "C" __global__')
    return before + names.sub(number, begin + kernels)


def _hash(function, spec: KernelSpec | LmKernels, level: str) -> str:
    if level == "code":
        return hashlib.sha256(code(function, spec).encode()).hexdigest()[:16]
    return f"{tvm_ffi.structural_hash(function, map_free_vars=True) & (2**64 - 1):016x}"


def _hashes_of(name: str, level: str, chosen: str) -> dict[str, str]:
    """Hash of each kernel of a spec, or the error of one that cannot be built."""
    found = {}
    for kernel, build in builders(SPECS[name]).items():
        if chosen not in kernel:
            continue
        try:
            found[f"{name}/{kernel}"] = _hash(build(), SPECS[name], level)
        except Exception as error:  # a spec that a kernel refuses has to be refused afterwards too
            found[f"{name}/{kernel}"] = type(error).__name__
    return found


def hashes(
    names: list[str], processes: int, level: str = "tir", kernel: str = ""
) -> dict[str, str]:
    """Hash of the kernels of the named specs whose name contains `kernel`."""
    hashes_of = functools.partial(_hashes_of, level=level, chosen=kernel)
    if processes == 1:
        groups = [hashes_of(name) for name in names]
    else:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            groups = pool.map(hashes_of, names, chunksize=1)
    return {kernel: value for group in groups for kernel, value in group.items()}


def compare(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Say of every kernel that differs how it does."""
    lines = []
    for kernel in sorted(before.keys() | after.keys()):
        old, new = before.get(kernel, "missing"), after.get(kernel, "missing")
        if old != new:
            lines.append(f"{kernel}: {old} -> {new}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "compare", "show"))
    parser.add_argument("file", type=Path, help="the JSON file; show: any path, unused")
    parser.add_argument("--only", default="", help="specs whose name contains this")
    parser.add_argument("--kernel", default="", help="kernels whose name contains this")
    parser.add_argument("--level", choices=("tir", "code"), default="tir")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    names = [name for name in SPECS if arguments.only in name]
    if arguments.action == "show":
        for name in names:
            for kernel, build in builders(SPECS[name]).items():
                if arguments.kernel in kernel:
                    is_code, function = arguments.level == "code", build()
                    text = code(function, SPECS[name]) if is_code else function.script()
                    print(f"# {name}/{kernel}\n{text}")
        return
    start = time.perf_counter()
    found = hashes(names, arguments.processes, arguments.level, arguments.kernel)
    seconds = time.perf_counter() - start
    if arguments.action == "record":
        arguments.file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(f"{len(found)} kernels of {len(names)} specs of {_TREE} in {seconds:.0f} s")
        return

    def chosen(table: dict[str, str]) -> dict[str, str]:
        return {
            kernel: value
            for kernel, value in table.items()
            if kernel.split("/")[0] in names and arguments.kernel in kernel.split("/")[1]
        }

    before, after = chosen(json.loads(arguments.file.read_text())), chosen(found)
    lines = compare(before, after)
    summary = f"{len(before)} kernels, {len(lines)} differ in {_TREE} ({seconds:.0f} s)"
    print("\n".join([*lines, summary]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
