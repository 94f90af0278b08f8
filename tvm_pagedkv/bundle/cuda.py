# SPDX-License-Identifier: Apache-2.0
"""The parts of a bundle for GPUs: required driver versions, and the CUDA runtime."""

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
NAME = "cuda"  # the target's name in a manifest


def describe_device_code(libraries: Iterable[Path]) -> dict[str, Any]:
    """Return the manifest fields that say which GPUs and drivers can run the libraries.

    Machine code needs a driver for the major version of the CUDA that compiled it. PTX needs a
    driver for that exact version or a later one.

    Returns
    -------
    dict
        ``device_code`` (names such as "sm_90"), ``driver`` and ``driver_for_ptx`` (minimum versions
        such as 13000).
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
    """Return TVM's runtime for GPUs, and the CUDA runtime that it needs if it is found."""
    needed = f"libcudart.so.{_cudart_major()}"
    found = next((path for path in _cudart_candidates(needed) if path.is_file()), None)
    return [_runtime(), *([found] if found else [])]


def _runtime() -> Path:
    path = Path(tvm.libinfo.find_libtvm_runtime()).with_name(RUNTIME)
    if not path.is_file():
        raise RuntimeError(f"this apache-tvm has no {RUNTIME}, which runs kernels on GPUs")
    return path


def _cudart_major() -> int:
    """Return the major version of the CUDA runtime that TVM's runtime links to."""
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
