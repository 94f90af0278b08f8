# SPDX-License-Identifier: Apache-2.0
"""Compilation targets: what a caller may name, and the SIMD traits of a CPU."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from pathlib import Path

from tvm.target import Target, codegen

from tir_kernels.spec import VectorTarget

# Features that an x86 level adds to the next lower one, as Linux names them.
_X86_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}
# What kernels use beyond the highest level: flags of Linux, and LLVM's names for them.
_BEYOND_LEVELS = {"avx512_bf16": "avx512bf16", "avx512_vnni": "avx512vnni"}


def resolve_target(target: Target | str | Mapping | None = None) -> Target:
    """Return the TVM target of a CPU.

    Parameters
    ----------
    target : str, mapping or tvm.target.Target, optional
        None or "native" is this machine. A string can name a CPU or level that LLVM knows
        ("x86-64-v3", "znver4"); anything else is passed to ``tvm.target.Target``.

    Raises
    ------
    ValueError
        If a string names neither a CPU nor a target, or if the target is not a CPU.
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
    """Raise a ValueError if a target is not a CPU."""
    if target.kind.name != "llvm":
        raise ValueError(f"kernels are for CPUs, target kind 'llvm', not for {target.kind.name!r}")


def vector_target(target: Target | str | Mapping | None = None) -> VectorTarget:
    """Return the SIMD traits of a CPU, from the features that LLVM enables for it."""
    target = resolve_target(target)
    features = {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
    if "avx512f" in features:
        return VectorTarget(
            lanes=16,
            registers=32,
            has_bf16_dot="avx512bf16" in features,
            has_vnni="avx512vnni" in features,
        )
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
            known = _BEYOND_LEVELS.items() if level == "x86-64-v4" else ()
            attributes = [f"+{feature}" for flag, feature in known if flag in flags]
            return Target({"kind": "llvm", "mcpu": level, "mattr": attributes})
        needed -= own
    return Target({"kind": "llvm", "mcpu": "x86-64"})


def _cpu_flags() -> set[str]:
    """Return the CPU features that Linux reports. A hypervisor may hide some of the model's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next(
        (set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set()
    )


def is_cuda(target: Target | str | Mapping | None) -> bool:
    """Return whether a target, as `build_kernels` takes it, is a CUDA GPU."""
    kind = target.get("kind") if isinstance(target, Mapping) else target
    return str(target.kind.name if isinstance(target, Target) else kind).startswith("cuda")
