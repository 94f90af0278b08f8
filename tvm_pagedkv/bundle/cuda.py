# SPDX-License-Identifier: Apache-2.0
"""What bundles with kernels for GPUs have besides: the driver they need, and CUDA's runtime."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import tvm

from ..compiler.cuda import cuda_version, device_code, find_nvcc

RUNTIME = "libtvm_runtime_cuda.so"
NAME = "cuda"  # of the target


def describe_device_code(libraries: Iterable[Path]) -> dict[str, Any]:
    """The fields of a target for GPUs that say where its libraries run.

    Machine code needs a driver of the CUDA that compiled it, in any minor version; PTX needs that
    very version, or a later one.
    """
    held, versions = [], []
    for library in libraries:
        held.append({_name(code.kind, code.arch) for code in device_code(library)})
        versions.append(cuda_version(library))
    driver = max(max(versions) // 1000, _cudart_major()) * 1000
    return {
        "device_code": sorted(set.intersection(*held)),
        "driver": driver,
        "driver_for_ptx": max(driver, *versions),
    }


def _name(kind: str, arch: int) -> str:
    return f"{'compute' if kind == 'ptx' else 'sm'}_{arch}"


def runtime_libraries() -> list[Path]:
    """TVM's runtime for GPUs, and CUDA's that it needs, where this machine has it."""
    needed = f"libcudart.so.{_cudart_major()}"
    found = next((path for path in _cudart_candidates(needed) if path.is_file()), None)
    return [_runtime(), *([found] if found else [])]


def _runtime() -> Path:
    path = Path(tvm.libinfo.find_libtvm_runtime()).with_name(RUNTIME)
    if not path.is_file():
        raise RuntimeError(f"this apache-tvm has no {RUNTIME}, which runs kernels on GPUs")
    return path


def _cudart_major() -> int:
    """The version of CUDA's runtime that TVM's names as needed."""
    named = re.search(rb"libcudart\.so\.(\d+)", _runtime().read_bytes())
    return int(named[1]) if named else 0


def _cudart_candidates(name: str) -> Iterator[Path]:
    homes = [Path(home) for home in [os.environ.get("CUDA_HOME")] if home]
    try:
        homes.append(Path(find_nvcc()).resolve().parent.parent)
    except RuntimeError:
        pass
    homes += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    for home in homes:
        yield home / "lib64" / name
        yield home / "lib" / name
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        yield from (Path(file.locate()) for file in files if file.name == name)
