# SPDX-License-Identifier: Apache-2.0
"""Kernels for AMX on a CPU without it: a model of the tile registers executes their instructions.

The LLVM functions that a kernel brings stay as they are, but for the names of the instructions,
which become functions of `tile_model.cc`. So numbers of tiles, strides and the configuration are
those of the hardware. The model is correct or not; it tells nothing about time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from tvm.target import Target

from tir_kernels.cpu.isa.matrices import amx
from tir_kernels.spec import VectorTarget
from tvm_pagedkv.compiler import targets
from tvm_pagedkv.compiler.disk_cache import sealed_file

_SOURCE = Path(__file__).with_name("tile_model.cc")
_FLAGS = ("-std=c++17", "-O2", "-ftree-vectorize", "-ffp-contract=off", "-fPIC", "-shared")
AMX = VectorTarget(has_bf16_dot=True, has_vnni=True, has_amx=True)
# All but the tiles.
CPU = Target({"kind": "llvm", "mcpu": "x86-64-v4", "mattr": ["+avx512bf16", "+avx512vnni"]})


class Counts(NamedTuple):
    """What was executed since `reset`."""

    begins: int
    ends: int
    loads: int
    stores: int
    dots: int
    threads: int


def runs_here() -> bool:
    """Whether this CPU runs what surrounds the tiles."""
    return set(targets.required_features(CPU)) <= targets.cpu_features()


@functools.cache
def model() -> ctypes.CDLL:
    """The compiled model, whose functions kernels find by their names."""
    content = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()

    def compile_model(path: Path) -> None:
        command = ["g++", *_FLAGS, str(_SOURCE), "-o", str(path)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr

    path = sealed_file(["tile model", content, *_FLAGS], ".so", compile_model)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.tile_model_error.restype = ctypes.c_char_p
    return library


def counts() -> Counts:
    """Return what was executed; an AssertionError if hardware had refused some of it."""
    error = model().tile_model_error().decode()
    assert not error, error
    numbers = (ctypes.c_int64 * len(Counts._fields))()
    model().tile_model_counts(numbers)
    return Counts(*numbers)


@contextmanager
def tile_model() -> Iterator[None]:
    """Compile kernels with `AMX` for the model within; check at the end that they used it rightly.

    Every task has configured the tiles once and released them.
    """
    model().tile_model_reset()
    helpers = amx.LLVM_HELPERS.replace("@llvm.x86.", "@tile_model_").replace(" immarg", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amx, "LLVM_HELPERS", helpers)
        patch.setattr(targets, "_target_with", lambda machine, features: CPU)
        yield
    done = counts()
    assert done.begins == done.ends
