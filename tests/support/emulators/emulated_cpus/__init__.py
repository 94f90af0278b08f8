# SPDX-License-Identifier: Apache-2.0
"""CPUs that qemu-user emulates: kernels and programs for them run here, slowly, and are checked."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import libinfo

from tir_kernels import build_kernel
from tir_kernels.spec import KernelSpec, VectorTarget
from tvm_pagedkv.compiler import build, vector_target
from tvm_pagedkv.compiler.disk_cache import sealed_file

from ...cases.kernels import attention_cases
from ...harness import fast_compilation
from ...harness.cpp_build import BUILDS, locked, run

_SOURCE = Path(__file__).with_name("call_kernel.cc")
_LINE_UP = 64  # bytes between which tensors begin


@dataclass(frozen=True)
class EmulatedCPU:
    """A CPU that qemu emulates.

    Parameters
    ----------
    emulator : tuple of str
        The command that runs a program.
    compiler : str
        A C++ compiler for it.
    target : str or mapping
        As `tvm_pagedkv.create` takes it: what kernels are compiled for.
    architecture : str
    """

    emulator: tuple[str, ...]
    compiler: str
    target: str | Mapping[str, str | list[str]]
    architecture: str

    @property
    def traits(self) -> VectorTarget:
        """The traits of its kernels."""
        return vector_target(self.target)

    @functools.cached_property
    def obstacle(self) -> str:
        """Why nothing can run on it here; else empty."""
        if platform.machine() != "x86_64":
            return "emulated CPUs are tested on x86-64"
        missing = [name for name in (self.emulator[0], self.compiler) if not shutil.which(name)]
        if missing:
            return f"no {' and no '.join(missing)} on PATH"
        try:
            self.packages()
        except subprocess.CalledProcessError as error:
            return f"the wheels for {self.architecture} cannot be downloaded: {error.stderr[-200:]}"
        return ""

    def packages(self) -> Path:
        """The folder with the packages tvm and tvm_ffi of the architecture."""
        if self.architecture == platform.machine():
            return Path(tvm.__file__).parents[1]
        return _downloaded(self.architecture)

    def run(self, program: Path, *arguments: str, **environment: str) -> str:
        """The output of a program that must succeed."""
        return run(*self.emulator, str(program), *arguments, env=self.environment(**environment))

    def environment(self, **more: str) -> dict[str, str]:
        """Variables with which programs find the libraries of TVM."""
        folders = [str(self.packages() / package / "lib") for package in ("tvm", "tvm_ffi")]
        own = {"LD_LIBRARY_PATH": os.pathsep.join(folders), "TVM_NUM_THREADS": "2"}
        return {**os.environ, **own, **more}

    def kernel(self, name: str, spec: KernelSpec) -> _Kernel:
        """A kernel that is compiled for this CPU, and runs on it when it is called."""
        target = fast_compilation.resolve_target(self.target)
        builders = {name: partial(build_kernel, name, spec)}
        symbols, library = build._library_of(builders, (name, repr(spec)), target, None)
        return _Kernel(self, library, symbols[name])

    def caller(self) -> Path:
        """The program `call_kernel`."""
        includes = [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
        library = self.packages() / "tvm_ffi" / "lib" / "libtvm_ffi.so"
        flags = ["-std=c++17", "-O0", *(f"-I{folder}" for folder in includes), str(_SOURCE)]
        key = [_SOURCE.read_text(), self.compiler, str(library), tvm_ffi.__version__]

        def compile_program(path: Path) -> None:
            run(self.compiler, *flags, str(library), "-ldl", "-o", str(path))

        program = sealed_file(key, ".program", compile_program)
        program.chmod(0o700)
        return program


@functools.cache
def _downloaded(architecture: str) -> Path:
    names = ("apache-tvm", "apache-tvm-ffi")
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in names]
    folder = BUILDS / "wheels" / architecture / "-".join(pinned)
    with locked(folder):
        if not (folder / "complete").exists():
            with tempfile.TemporaryDirectory() as scratch:
                pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch]
                tags = [f"--platform=manylinux_2_28_{architecture}", "--only-binary=:all:"]
                command = [*pip, "--disable-pip-version-check", *tags, *pinned]
                subprocess.run(command, check=True, capture_output=True, text=True)
                for wheel in Path(scratch).glob("*.whl"):
                    with zipfile.ZipFile(wheel) as archive:
                        needed = [n for n in archive.namelist() if n.endswith(_NEEDED)]
                        archive.extractall(folder, needed)
            (folder / "complete").touch()
    return folder


_NEEDED = ("lib/libtvm_runtime.so", "lib/libtvm_ffi.so")


class _Kernel:
    """Takes the arguments of a kernel, and runs it in a process on the emulated CPU."""

    def __init__(self, cpu: EmulatedCPU, library: Path, symbol: str):
        self._cpu, self._library, self._symbol = cpu, library, symbol

    def __call__(self, *arguments) -> None:
        words, tensors, memory = [], [], bytearray()
        for argument in arguments:
            if isinstance(argument, tvm.runtime.Tensor):
                array = argument.numpy()
                shift = 4 if array.itemsize == 1 else 3 * array.itemsize  # and no more aligned
                shape = ",".join(map(str, array.shape))
                words.append(f"tensor:{argument.dtype}:{len(memory)}:{shift}:{shape}")
                tensors.append((argument, array, len(memory) + shift))
                size = shift + array.nbytes
                memory += bytes(shift) + array.tobytes() + bytes(-size % _LINE_UP)
            elif argument is None:
                words.append("none")
            else:
                kind = "float" if isinstance(argument, float) else "int"
                words.append(f"{kind}:{argument!r}" if kind == "float" else f"int:{int(argument)}")
        with tempfile.NamedTemporaryFile(suffix=".memory") as file:
            file.write(memory)
            file.flush()
            self._cpu.run(self._cpu.caller(), str(self._library), self._symbol, file.name, *words)
            after = Path(file.name).read_bytes()
        assert len(after) == len(memory)
        for tensor, array, begin in tensors:
            got = np.frombuffer(after, array.dtype, array.size, begin).reshape(array.shape)
            if got.tobytes() != array.tobytes():
                tensor.copyfrom(got)
        ends = [0, *itertools.chain(*((b, b + a.nbytes) for _, a, b in tensors)), len(memory)]
        for begin, end in zip(ends[::2], ends[1::2], strict=True):
            assert not any(after[begin:end]), "a kernel wrote between its tensors"


CPUS = {
    "x86-64": EmulatedCPU(("qemu-x86_64", "-cpu", "Nehalem"), "g++", "x86-64", "x86_64"),
    "Haswell": EmulatedCPU(("qemu-x86_64", "-cpu", "Haswell"), "g++", "x86-64-v3", "x86_64"),
    "AArch64": EmulatedCPU(
        ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", "max"),
        "aarch64-linux-gnu-g++",
        {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"},
        "aarch64",
    ),
}
_ARM = CPUS["AArch64"]  # with dot products of bytes
CPUS |= {
    "AArch64+bf16": replace(_ARM, target={**_ARM.target, "mattr": ["+bf16", "+i8mm"]}),
    "Cortex-A57": replace(
        _ARM,
        emulator=(*_ARM.emulator[:-1], "cortex-a57"),
        target={"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57"},
    ),
}


@contextlib.contextmanager
def kernels_on(cpu: EmulatedCPU) -> Iterator[None]:
    """Run the kernels that the support modules compile on an emulated CPU; skip where none is."""
    if cpu.obstacle:
        pytest.skip(cpu.obstacle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention_cases, "_compiled_for_cpu", lambda name, spec, target: cpu.kernel(name, spec)
        )
        yield
