# SPDX-License-Identifier: Apache-2.0
"""Classes of CPUs, and what kernels do differently for each of them.

A CPU may have an instruction that does not pay, and the register tile that keeps its multipliers
busy follows from their latency and from how many loads it makes in a cycle. Neither follows from
the instruction set, so each class lists the CPUs that it is about, by LLVM's names. A level such as
``x86-64-v4`` names no CPU; `targets.native_target` therefore adds the CPU's name as the target's
``model``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tir_kernels.spec import VectorTarget


@dataclass(frozen=True)
class CpuClass:
    """CPUs that run the same kernels fast.

    Parameters
    ----------
    name : str
    needs : frozenset of str
        LLVM's names of the features that every CPU of the class has.
    cpus : frozenset of str
        LLVM's names of its CPUs.
    hints : frozenset of str
        Features that only CPUs of the class have: one of them does for a name. With neither names
        nor hints, the class takes all CPUs that have what it needs.
    fields : mapping
        Fields of `VectorTarget` that do not follow from the features.
    """

    name: str
    needs: frozenset[str] = frozenset()
    cpus: frozenset[str] = frozenset()
    hints: frozenset[str] = frozenset()
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def has(self, cpu: str, features: frozenset[str]) -> bool:
        """Whether a CPU with these features is of the class."""
        is_known = cpu in self.cpus or bool(self.hints & features)
        return self.needs <= features and (is_known or not (self.cpus or self.hints))

    def traits(self, features: frozenset[str]) -> VectorTarget:
        """Return the traits of a CPU of the class."""
        return VectorTarget(**_traits(features) | dict(self.fields))


def _class(name: str, needs: str = "", cpus: str = "", hints: str = "", **fields: Any) -> CpuClass:
    sets = [frozenset(x.split()) for x in (needs, cpus, hints)]
    return CpuClass(name, sets[0], sets[1], sets[2], fields)


# The first class that has a CPU is its own.
CLASSES = (
    # Measured on Sapphire Rapids: bfloat16 prefill makes 207 GFLOP/s with vdpbf16ps, and 310 with
    # float32 multiply-adds; a tile of 6 x 4, with a broadcast for four products, beats 8 x 2.
    # Decode waits for memory, where pairs save the conversion.
    _class(
        "Intel AVX-512",
        "avx512f",
        "skylake-avx512 skx cascadelake cooperlake cannonlake icelake-client icelake-server "
        "rocketlake tigerlake sapphirerapids emeraldrapids graniterapids graniterapids-d "
        "diamondrapids novalake",
        "amx-tile",
        slow_bf16_dot=True,
        tile=(6, 4),
    ),
    # As the next class, but it fetches a stream from memory by itself faster than prefetches of all
    # lines do. Linear layers of a row read codes 1.26 to 1.43 times as fast with every other line.
    _class("Zen 4", "avx512f", "znver4", fetches_streams=True),
    # Zen 5, and levels: vdpbf16ps makes twice the products of a float32 multiply-add. On a Zen 5,
    # tiles of 6 x 4 are 1 to 5 % slower than 8 x 2, and 21 to 28 % in steps of two rows.
    _class("AVX-512", "avx512f"),
    _class("AVX2", "avx2"),
    _class("AArch64", "neon"),
    _class("128-bit vectors"),
)


def cpu_class(cpu: str, features: frozenset[str]) -> CpuClass:
    """Return the class of a CPU, by LLVM's names of it and of its features."""
    return next(each for each in CLASSES if each.has(cpu, features))


def choices(traits: VectorTarget) -> str:
    """Say what kernels for a CPU do, in a line."""
    with_pairs = ["decode"] if traits.has_bf16_dot or traits.has_bfdot else []
    with_pairs += ["prefill"] if traits.multiplies_pairs or traits.has_bfdot else []
    with_pairs += ["linear layers"] if traits.multiplies_pairs else []
    codes = "bytes" if traits.has_byte_dot else ("words" if traits.has_word_dot else "float32")
    return "; ".join(
        [
            f"vectors of {32 * traits.lanes} bits",
            f"register tiles of {traits.tile_rows} x {traits.tile_vectors} vectors",
            *(["bfloat16 in AMX in prefill and linear layers"] if traits.has_amx else []),
            f"pairs of bfloat16 in {', '.join(with_pairs) or 'nothing'}",
            f"codes multiplied as {codes}",
        ]
    )


def _traits(features: frozenset[str]) -> dict[str, Any]:
    """Return the fields of `VectorTarget` that follow from the features."""
    if "avx512f" in features:
        return {
            "lanes": 16,
            "registers": 32,
            "has_bf16_dot": "avx512bf16" in features,
            "has_vnni": "avx512vnni" in features,
            "has_amx": {"amx-bf16", "amx-tile", "avx512bf16"} <= features,
        }
    if "avx2" in features:
        has_f16_convert = "f16c" in features
        return {
            "lanes": 8,
            "registers": 16,
            "has_f16_convert": has_f16_convert,
            "has_word_dot": True,
        }
    is_arm = "neon" in features
    return {
        "lanes": 4,
        "registers": 32 if is_arm else 16,
        "has_sdot": "dotprod" in features,
        "has_smmla": {"dotprod", "i8mm"} <= features,
        "has_bfdot": is_arm and "bf16" in features,
        "has_f16_convert": is_arm,
    }
