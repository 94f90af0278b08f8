# SPDX-License-Identifier: Apache-2.0
"""`write_bundle`: a folder with compiled kernels, the libraries that run them, a manifest."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi.libinfo
from tvm.target import Target

from .. import _library
from .._version import __version__
from ..compiler import (
    architecture,
    build_libraries,
    config_map,
    is_cuda,
    required_features,
    resolve_target,
)
from ..compiler.cuda import check_archs
from ..config import KVCacheConfig
from . import cuda as bundle_cuda
from .load import MANIFEST, describe_config

FORMAT = 1  # equals kBundleFormat in runtime_ext/bundle/bundle.h
LIBRARIES = ("libtvm_ffi.so", "libtvm_runtime.so", "libtvm_pagedkv.so")
_MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of ELF files


def write_bundle(
    config: KVCacheConfig,
    path: str | Path,
    targets: Sequence[Target | str | Mapping] = ("native",),
    *,
    archs: Sequence[str] = (),
    libraries: Iterable[str | Path] = (),
    bare: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write a bundle: a folder from which machines without a compiler can make caches.

    Parameters
    ----------
    config : KVCacheConfig
        Configuration of the caches. Capacities can be changed when a cache is made.
    path : str or Path
        A folder that does not exist or is empty.
    targets : sequence of str, mapping or tvm.target.Target
        "native", a CPU that LLVM knows ("x86-64-v3"), "aarch64-linux-gnu" or
        "aarch64-linux-gnu:CPU", a TVM target, or "cuda". Another architecture needs a linker
        ``ARCHITECTURE-linux-gnu-g++`` on PATH; "cuda" needs nvcc.
    archs : sequence of str
        For target "cuda": compute capabilities such as "90". GPUs with a higher one run PTX.
    libraries : iterable of paths
        Folders with the libraries of other architectures. Without them, a machine of such an
        architecture needs tvm_pagedkv installed.
    bare : bool
        Whether to leave out all libraries, for machines that have tvm_pagedkv installed.
    progress : callable, optional
        Called with a line of text before and after a compilation, which is logged as well.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ValueError
        If the folder is not empty, a target has no kernels, `archs` is empty or too old for
        "cuda", or the `prefix_cache` of `config` has a store that is an object.
    RuntimeError
        If compiling or linking fails; the message says what is missing.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"a bundle needs a folder of its own, and {path} is not empty")
    for_gpus = any(map(is_cuda, targets))
    if for_gpus:
        check_archs(archs)
    elif archs:
        raise ValueError(f'archs are for target "cuda", which is not among {list(targets)}')
    cpus = [bundle_target(target) for target in targets if not is_cuda(target)]
    resolved: dict[str, Target | str] = {_name_of(target): target for target in cpus}
    if for_gpus:
        resolved[bundle_cuda.NAME] = "cuda"
    if not resolved:
        raise ValueError("a bundle needs at least one target")
    folders = {_architecture_of(Path(f)): Path(f) for f in libraries}
    written_config = describe_config(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=path.parent) as scratch:
        built = Path(scratch) / "bundle"
        described = [
            _add_target(built, config, name, target, archs, progress)
            for name, target in resolved.items()
        ]
        manifest = {
            "format": FORMAT,
            "versions": {
                "tvm-pagedkv": __version__,
                "apache-tvm": importlib.metadata.version("apache-tvm"),
                "apache-tvm-ffi": importlib.metadata.version("apache-tvm-ffi"),
            },
            "config": written_config,
            "cache": described[0].pop("cache"),
            "targets": [{k: v for k, v in each.items() if k != "cache"} for each in described],
            "libraries": {},
        }
        if not bare:
            architectures = {each["architecture"] for each in described}
            manifest["libraries"] = _add_libraries(built, architectures, folders)
        if for_gpus and not bare:
            manifest["libraries"][_own_architecture()] += _add_cuda_libraries(built)
        manifest["files"] = {
            str(file.relative_to(built)): {
                "bytes": file.stat().st_size,
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
            for file in sorted(built.rglob("*.so*"))
        }
        text = json.dumps(manifest, indent=1) + "\n"
        (built / MANIFEST).write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        (built / "manifest.sha256").write_text(f"{digest}  {MANIFEST}\n")
        if path.exists():
            path.rmdir()
        built.rename(path)
    return path


def bundle_target(target: Target | str | Mapping) -> Target:
    """Return the TVM target of a CPU, as `write_bundle` takes it."""
    if isinstance(target, str) and "-linux-" in target:
        triple, _, cpu = target.partition(":")
        target = {"kind": "llvm", "mtriple": triple, **({"mcpu": cpu} if cpu else {})}
    return resolve_target(target)


def _name_of(target: Target) -> str:
    triple = str(target.attrs.get("mtriple", ""))
    cpu = str(target.attrs.get("mcpu", ""))
    attributes = "".join(map(str, target.attrs.get("mattr", ())))
    return ":".join(filter(None, [triple, cpu])) + attributes


def _add_target(
    folder: Path,
    config: KVCacheConfig,
    name: str,
    target: Target | str,
    archs: Sequence[str],
    progress: Callable | None,
) -> dict[str, Any]:
    on_gpu = is_cuda(target)
    sets = build_libraries(config, target, progress, archs if on_gpu else None)
    described = []
    for index, (symbols, library) in enumerate(sets.libraries):
        file = Path("kernels") / f"{name.replace(':', '-')}.{index}.so"
        (folder / file.parent).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, folder / file)
        described.append({"library": str(file), "kernels": dict(symbols)})
    return {
        "name": name,
        "device": "cuda" if on_gpu else "cpu",
        "target": str(target),
        "architecture": _own_architecture() if on_gpu else architecture(target),
        "features": [] if on_gpu else required_features(target),
        **(bundle_cuda.describe_device_code(path for _, path in sets.libraries) if on_gpu else {}),
        "kernel_sets": described,
        "cache": _as_json(config_map(config.resolved(), sets, tvm.cpu())),
    }


def _as_json(value: Any) -> Any:
    """Return a configuration map as JSON values: shapes and tensors become lists."""
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, tvm.runtime.Tensor):
        return value.numpy().tolist()
    if isinstance(value, (list, tuple, tvm_ffi.Shape)):
        return [_as_json(each) for each in value]
    return value


def _add_libraries(
    folder: Path, architectures: set[str], folders: Mapping[str, Path]
) -> dict[str, list[str]]:
    own = _own_architecture()
    added = {}
    for each in sorted(architectures):
        if each in folders:
            sources = [folders[each] / name for name in LIBRARIES]
        elif each == own:
            runtime = Path(tvm.libinfo.find_libtvm_runtime())
            sources = [Path(tvm_ffi.libinfo.find_libtvm_ffi()), runtime, _library.path()]
        else:
            continue
        target = folder / "lib" / each
        target.mkdir(parents=True)
        for name, source in zip(LIBRARIES, sources, strict=True):
            shutil.copyfile(source, target / name)
        added[each] = [f"lib/{each}/{name}" for name in LIBRARIES]
    return added


def _own_architecture() -> str:
    return architecture(Target({"kind": "llvm"}))


def _add_cuda_libraries(folder: Path) -> list[str]:
    target = Path("lib") / _own_architecture()
    sources = bundle_cuda.runtime_libraries()
    for source in sources:
        shutil.copyfile(source, folder / target / source.name)
    return [str(target / source.name) for source in sources]


def _architecture_of(folder: Path) -> str:
    missing = [name for name in LIBRARIES if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which a bundle needs")
    head = (folder / LIBRARIES[-1]).read_bytes()[:20]
    machine = struct.unpack("<H", head[18:20])[0] if head[:4] == b"\x7fELF" else None
    if machine not in _MACHINES:
        raise ValueError(f"{folder / LIBRARIES[-1]} is not a library for x86_64 or aarch64")
    return _MACHINES[machine]
