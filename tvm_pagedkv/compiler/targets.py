# SPDX-License-Identifier: Apache-2.0
"""Compilation targets: what a caller may name, and the SIMD traits of a CPU."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from pathlib import Path

from tvm.target import Target, codegen

from tir_kernels.spec import VectorTarget

# Features of an x86 level, beyond those of the next one, as Linux names them.
_X86_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}


def resolve_target(target: Target | str | Mapping | None = None) -> Target:
    """A TVM target for code that runs here.

    Parameters
    ----------
    target : optional
        None or "native": this machine. Otherwise the name of a CPU or level that LLVM knows
        ("x86-64-v3", "x86-64-v4", "znver4"), a TVM target, or what makes one.

    Raises
    ------
    ValueError
        For a string that names neither a CPU nor a target, and for targets other than CPUs.
    """
    if target is None or target == "native":
        target = _native_target()
    elif isinstance(target, str) and codegen.llvm_is_valid_cpu(target, _host_triple()):
        target = Target({"kind": "llvm", "mcpu": target})
    elif not isinstance(target, Target):
        try:
            target = Target(target)
        except Exception as error:
            raise ValueError(
                f'target must be "native", a CPU that LLVM knows, or a TVM target; got {target!r}'
            ) from error
    require_cpu(target)
    return target


def require_cpu(target: Target) -> None:
    """Refuse a target for which there are no kernels."""
    if target.kind.name != "llvm":
        raise ValueError(f"kernels are for CPUs, target kind 'llvm', not for {target.kind.name!r}")


def vector_target(target: Target | str | Mapping | None = None) -> VectorTarget:
    """The SIMD traits of a target, from the features that LLVM enables for it."""
    target = resolve_target(target)
    features = {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
    if "avx512f" in features:
        return VectorTarget(lanes=16, registers=32, has_bf16_dot="avx512bf16" in features)
    if "avx2" in features:
        return VectorTarget(lanes=8, registers=16, has_f16_convert="f16c" in features)
    is_arm = "neon" in features
    return VectorTarget(lanes=4, registers=32 if is_arm else 16, has_f16_convert=is_arm)


def _host_triple() -> str:
    return str(codegen.llvm_get_system_triple())


@functools.cache
def _native_target() -> Target:
    if platform.machine() not in ("x86_64", "AMD64"):
        return Target({"kind": "llvm", "mcpu": str(codegen.llvm_get_system_cpu())})
    flags = _cpu_flags()
    needed: set[str] = set().union(*_X86_LEVELS.values())
    for level, own in _X86_LEVELS.items():
        if needed <= flags:
            attributes = ["+avx512bf16"] if "avx512_bf16" in flags and level == "x86-64-v4" else []
            return Target({"kind": "llvm", "mcpu": level, "mattr": attributes})
        needed -= own
    return Target({"kind": "llvm", "mcpu": "x86-64"})


def _cpu_flags() -> set[str]:
    """Features as Linux names them; a hypervisor may hide some of what the CPU's name promises."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next(
        (set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set()
    )


def is_cuda(target: Target | str | Mapping | None) -> bool:
    """Whether a target, as `build_kernels` takes it, is a GPU."""
    kind = target.get("kind") if isinstance(target, Mapping) else target
    return str(target.kind.name if isinstance(target, Target) else kind).startswith("cuda")
