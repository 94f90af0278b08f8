# SPDX-License-Identifier: Apache-2.0
"""Writes the folder that is checked on a machine with a GPU: bundles, Python sources, libraries."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import gpu_check_configs
import tvm
import tvm_ffi
from gpu_check_configs import CODED, NAMES, RECURRENT, RECURRENT_OPTIONS, config_of
from tvm.target import Target

import tvm_pagedkv as pkv
from tests.support.emulators import stock
from tests.support.worlds import recurrent_world
from tir_kernels.releases import export_cuda_host
from tvm_pagedkv import _library
from tvm_pagedkv.bundle import cuda as bundle_cuda
from tvm_pagedkv.bundle.load import read_config
from tvm_pagedkv.compiler.cuda.library import compile_library

MAX_BYTES = 60_000_000
ROOT = Path(__file__).resolve().parents[2]
# What nothing imports without the compiler, and what is for compilers in C++.
WITHOUT = {
    "tvm": ("lib", "include", "3rdparty", "src", "relax", "cmake", "licenses"),
    "tvm_ffi": ("include", "3rdparty", "src", "share", "cython", "stub"),
}
FALLBACKS = ("ml_dtypes", "typing_extensions")  # for a machine that has them not
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")


def pack(folder: Path, archs: list[str], python: str, device: str, is_tiny: bool) -> None:
    """Write the folder.

    Parameters
    ----------
    folder : Path
        New or empty.
    archs : list of str
        Of GPUs.
    python : str
        Version of the interpreter that will run there, such as "3.12".
    device : {"cuda", "cpu"}
        What the bundles are for.
    is_tiny : bool
        Small shapes.

    Raises
    ------
    ValueError
        When there is something in the folder.
    RuntimeError
        When it came out larger than it may be, or a package could not be downloaded.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    _copy_python(folder, python)
    configs = {name: read_config(config_of(name, is_tiny)) for name in NAMES}
    configs[RECURRENT] = recurrent_world.world_config(**RECURRENT_OPTIONS, is_wide=not is_tiny)
    for name, config in configs.items():
        print(f"bundle {name}", flush=True)
        targets = {"targets": ["cuda"], "archs": archs} if device == "cuda" else {}
        pkv.write_bundle(config, folder / "bundles" / name, bare=True, progress=print, **targets)
        if device == "cuda" and name not in ("float32", RECURRENT, *CODED):
            _write_stock(folder / "stock", config, archs)
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {num_bytes / 1e6:.1f} MB")
    if num_bytes > MAX_BYTES:
        raise RuntimeError(f"the folder may have {MAX_BYTES} bytes, and has {num_bytes}")


def _copy_python(folder: Path, python: str) -> None:
    site = folder / "python"
    own = Path(pkv.__file__).parent
    for package in (Path(tvm.__file__).parent, own, ROOT / "tir_kernels"):
        _copy_sources(package, site / package.name, WITHOUT.get(package.name, ()))
    shutil.copy(_library.path(), site / own.name)
    library = Path(tvm.libinfo.find_libtvm_runtime())
    (site / "tvm" / "lib").mkdir()
    for file in (library, *bundle_cuda.runtime_libraries()):
        shutil.copy(file, site / "tvm" / "lib")
    if python == "{}.{}".format(*sys.version_info):
        package = Path(tvm_ffi.__file__).parent
        _copy_sources(package, site / "tvm_ffi", WITHOUT["tvm_ffi"], (".py", ".so"))
    else:
        _download(python, [f"apache-tvm-ffi=={_version('apache-tvm-ffi')}"], site)
        for name in WITHOUT["tvm_ffi"]:
            shutil.rmtree(site / "tvm_ffi" / name, ignore_errors=True)
        _download(python, FALLBACKS, folder / "extra")
    for name in ("apache-tvm", "apache-tvm-ffi"):
        about = site / f"{name.replace('-', '_')}-{_version(name)}.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {_version(name)}\n"
        )
    for name in ("reference", "support"):
        without = ("mlc_standin", "cuda_emulator")
        _copy_sources(ROOT / "tests" / name, folder / "tests" / name, without)
    shutil.copy(ROOT / "tests" / "__init__.py", folder / "tests")
    for file in Path(gpu_check_configs.__file__).parent.glob("gpu_check*.py"):
        if file.name != Path(__file__).name:
            shutil.copy(file, folder)


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _copy_sources(
    source: Path, target: Path, without: Iterable[str], endings: tuple[str, ...] = (".py",)
) -> None:
    for file in sorted(source.rglob("*")):
        relative = file.relative_to(source)
        if file.suffix in endings and relative.parts[0] not in without:
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target / relative)


def _download(python: str, packages: Iterable[str], target: Path) -> None:
    """Unpack wheels for another Python."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
        for platform in PLATFORMS:
            command += ["--platform", f"{platform}_x86_64"]
        done = subprocess.run([*command, *packages], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"pip could not download {', '.join(packages)}: {done.stderr}")
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as content:
                content.extractall(target)


def _write_stock(folder: Path, config: pkv.KVCacheConfig, archs: list[str]) -> None:
    """apache-tvm's own kernels for plain layers, as a library that needs no TVM."""
    heads = config.num_qo_heads, config.num_kv_heads
    path = folder / f"{config.dtype}-{heads[0]}-{heads[1]}.so"
    folder.mkdir(exist_ok=True)
    target = Target(
        {
            "kind": "cuda",
            "arch": f"sm_{archs[0]}",
            "max_threads_per_block": 1024,
            "thread_warp_size": 32,
            "max_shared_memory_per_block": 49152,
        },
        host={"kind": "cuda_host"},
    )
    try:
        module = stock.stock_cuda_module(*heads, config.qk_head_dim, config.dtype, target)
        with target:
            built = tvm.compile(module, target=target, tir_pipeline="s_tir")
        compile_library(export_cuda_host(built.mod), path, archs)
    except Exception as error:  # they are for comparison, and not ours
        lines = str(error).strip().splitlines()
        print(f"no kernels of apache-tvm for {path.stem}: {lines[-1][:200] if lines else error!r}")
