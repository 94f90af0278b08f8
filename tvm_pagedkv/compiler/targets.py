# SPDX-License-Identifier: Apache-2.0
"""Compilation targets: what a caller may name, and the SIMD traits of a CPU."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import tvm_ffi
from tvm.target import Target, codegen

from tir_kernels.spec import VectorTarget

from .cpu_classes import CpuClass, cpu_class

_log = logging.getLogger("tvm_pagedkv.compiler")

# CPU features that change a kernel's code: LLVM's name, and Linux's name if it differs.
_X86 = (
    "amx-bf16:amx_bf16 amx-fp16:amx_fp16 amx-int8:amx_int8 amx-tile:amx_tile avx avx2 "
    "avx512bf16:avx512_bf16 avx512bitalg:avx512_bitalg avx512bw avx512cd avx512dq avx512f "
    "avx512fp16:avx512_fp16 avx512ifma avx512vbmi avx512vbmi2:avx512_vbmi2 avx512vl "
    "avx512vnni:avx512_vnni avx512vp2intersect:avx512_vp2intersect "
    "avx512vpopcntdq:avx512_vpopcntdq avxifma:avx_ifma avxneconvert:avx_ne_convert "
    "avxvnni:avx_vnni avxvnniint16:avx_vnni_int16 avxvnniint8:avx_vnni_int8 bmi:bmi1 bmi2 f16c "
    "fma fma4 gfni lzcnt:abm movbe popcnt sse3:pni sse4.1:sse4_1 sse4.2:sse4_2 sse4a ssse3 tbm "
    "vaes vpclmulqdq xop"
)
_AARCH64 = (
    "altnzcv:flagm2 bf16 complxnum:fcma crc:crc32 dotprod:asimddp flagm fp16fml:asimdfhm "
    "fptoint:frint fullfp16:asimdhp i8mm jsconv:jscvt lse2:uscat lse:atomics neon:asimd "
    "rcpc-immo:ilrcpc rcpc:lrcpc rdm:asimdrdm sve sve-bitperm:svebitperm sve2"
)


def _names(pairs: str) -> dict[str, str]:
    return {pair.split(":")[0]: pair.split(":")[-1] for pair in pairs.split()}


_LINUX_NAMES = {"x86_64": _names(_X86), "aarch64": _names(_AARCH64)}

# The x86 levels that kernels distinguish, and LLVM's names of what they use beyond each.
_X86_LEVELS = "x86-64-v4", "x86-64-v3", "x86-64"
_BEYOND_LEVELS = {
    "x86-64-v4": ("amx-bf16", "amx-tile", "avx512bf16", "avx512vnni"),
    "x86-64-v3": ("avxvnni",),
}
# A preference, not a feature: without it, LLVM makes a multiplication and an addition of vpdpwssd.
_NO_SPLIT = "+fast-dpwssd"


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
        target = native_target()
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


def cpu_features() -> frozenset[str]:
    """Return the features that code in this process may use, as Linux names them.

    The runtime asks the CPU, so that what a hypervisor or an emulator hides is not used. The
    environment variable ``TVM_PAGEDKV_CPU_FEATURES`` names the only ones that are left, or, with a
    minus before each, those that are left out. A CPU with AMX makes the process ask Linux for it;
    where that is refused, a warning on stderr says so, and the features do not name it.
    """
    return frozenset(map(str, tvm_ffi.get_global_func("pagedkv.cpu_features")()))


def required_features(target: Target) -> list[str]:
    """Return the CPU features that code for a target may use, as Linux names them."""
    known, enabled = _LINUX_NAMES.get(architecture(target), {}), _enabled(target)
    return sorted(linux for llvm, linux in known.items() if llvm in enabled)


def require_runnable(target: Target) -> None:
    """Raise a ValueError if this machine's CPU cannot run code for a target.

    The CPU executes what a function of the code says, and an instruction that it lacks ends the
    process. So this comes before code is loaded.
    """
    if target.kind.name != "llvm":
        return
    name = ":".join(filter(None, [str(target.attrs.get(key, "")) for key in ("mtriple", "mcpu")]))
    require = tvm_ffi.get_global_func("pagedkv.require_cpu")
    what = f"code for {name or 'the target llvm'}"
    require(what, architecture(target), required_features(target))


def architecture(target: Target) -> str:
    """Return the architecture of a target: the first part of its triple."""
    triple = str(target.attrs.get("mtriple", "")) or _host_triple()
    return triple.split("-")[0]


def class_of(target: Target | str | Mapping | None = None) -> CpuClass:
    """Return the class of a CPU, which decides what the features leave open.

    The CPU is the one that the target's `model` names, or else its `mcpu`.
    """
    cpu = resolve_target(target)
    name = str(cpu.attrs.get("model", "") or cpu.attrs.get("mcpu", ""))
    return cpu_class(name, frozenset(_enabled(cpu)))


def vector_target(target: Target | str | Mapping | None = None) -> VectorTarget:
    """Return the SIMD traits of a CPU, from the features that LLVM enables for it and its class.

    A target that names no CPU gets those that all CPUs of its architecture have. A warning of the
    logger ``tvm_pagedkv.compiler`` says so where this machine's CPU has wider vectors.
    """
    cpu = resolve_target(target)
    traits = class_of(cpu).traits(frozenset(_enabled(cpu)))
    if "mcpu" not in cpu.attrs and architecture(cpu) == _host_triple().split("-")[0]:
        _warn_without_cpu(traits.lanes, vector_target(native_target()).lanes)
    return traits


@functools.cache
def _warn_without_cpu(lanes: int, native_lanes: int) -> None:
    if lanes < native_lanes:
        _log.warning(
            "the target names no CPU, so its kernels use vectors of %d bits, and this machine's "
            "CPU has vectors of %d bits; name it by mcpu=%r, or use tvm_pagedkv.native_target()",
            32 * lanes,
            32 * native_lanes,
            str(native_target().attrs["mcpu"]),
        )


def _enabled(target: Target) -> set[str]:
    return {str(feature) for feature in codegen.llvm_get_cpu_features(target)}


def _host_triple() -> str:
    return str(codegen.llvm_get_system_triple())


def native_target() -> Target:
    """Return the TVM target of this machine's CPU, which `create` compiles for by default."""
    return _target_with(architecture(Target({"kind": "llvm"})), cpu_features())


@functools.cache
def _target_with(machine: str, features: frozenset[str]) -> Target:
    """Return the target of this CPU when it has these features."""
    if machine == "x86_64":
        return _x86_target(features)
    target = Target({"kind": "llvm", "mcpu": str(codegen.llvm_get_system_cpu())})
    known, enabled = _LINUX_NAMES.get(machine, {}), _enabled(target)
    hidden = [f"-{llvm}" for llvm in known if llvm in enabled and known[llvm] not in features]
    return Target({**target.export(), "mattr": hidden}) if hidden else target


def _x86_target(features: frozenset[str]) -> Target:
    linux = _LINUX_NAMES["x86_64"]
    level = next(
        level
        for level in _X86_LEVELS
        if features.issuperset(required_features(Target({"kind": "llvm", "mcpu": level})))
    )
    fields: dict[str, Any] = {"kind": "llvm", "mcpu": level}
    if level in _BEYOND_LEVELS:
        known = _BEYOND_LEVELS[level]
        fields["mattr"] = [f"+{name}" for name in known if linux[name] in features]
        if "+avxvnni" in fields["mattr"]:
            fields["mattr"].append(_NO_SPLIT)
    tuned = fields | {"model": str(codegen.llvm_get_system_cpu())}
    # The level does not tell what is fast on this CPU.
    return Target(tuned if class_of(tuned) != class_of(fields) else fields)


def is_cuda(target: Target | str | Mapping | None) -> bool:
    """Return whether a target, as `build_kernels` takes it, is a CUDA GPU."""
    kind = target.get("kind") if isinstance(target, Mapping) else target
    return str(target.kind.name if isinstance(target, Target) else kind).startswith("cuda")
