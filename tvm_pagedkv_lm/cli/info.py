# SPDX-License-Identifier: Apache-2.0
"""``tvm-pagedkv info``: versions, target, threads and folders."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path


def add_parser(commands) -> None:
    """Add the command."""
    add = commands.add_parser("info", help="versions, target, threads and folders")
    add.set_defaults(run=run)


def run(_: argparse.Namespace) -> None:
    """Print a line for each version, setting and folder."""
    from importlib.metadata import PackageNotFoundError, version

    from tvm_pagedkv import __version__, available_cpus, library_path, num_threads
    from tvm_pagedkv.compiler import cache_dir, choices, class_of, resolve_target, vector_target

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    target = resolve_target()
    traits = vector_target(target)
    sizes = _compiled_sizes(cache_dir())
    rows = {
        "tvm-pagedkv": __version__,
        "apache-tvm": installed("apache-tvm"),
        "apache-tvm-ffi": installed("apache-tvm-ffi"),
        "library": library_path(),
        "target": f"{target.kind.name}, {target.attrs.get('mcpu', 'generic CPU')}",
        "CPU class": f"{class_of(target).name}: {choices(traits)}",
        "CPU": f"{traits.lanes} float32 lanes, {traits.registers} registers, "
        f"bfloat16 dot product: {'yes' if traits.has_bf16_dot else 'no'}, "
        f"byte dot product: {'yes' if traits.has_byte_dot else 'no'}, "
        f"float16 conversion: {'yes' if traits.has_f16_convert else 'no'}",
        "threads": f"{num_threads()} of {len(available_cpus())} CPUs that the process may use",
        "compiled files": f"{cache_dir()} ({len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB)",
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


def _compiled_sizes(folder: Path) -> list[int]:
    """Return the sizes of compiled files. Other processes may remove files meanwhile."""
    sizes = []
    for parent, folders, files in os.walk(folder):
        if Path(parent) == folder and "models" in folders:
            folders.remove("models")
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                sizes.append(Path(parent, file).stat().st_size)
    return sizes
