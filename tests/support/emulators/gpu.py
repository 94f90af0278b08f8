# SPDX-License-Identifier: Apache-2.0
"""The GPU of this machine in the place of the emulator, for the same cases."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest
import tvm
import tvm_ffi

from tvm_pagedkv.compiler.cuda.library import compile_library, compiler_version
from tvm_pagedkv.compiler.disk_cache import sealed_file

from ..cases.kernels import attention_cases


class KernelsOnGpu:
    """Kernels that take tensors on the host, and run on the GPU over copies of them.

    Parameters
    ----------
    source : str
        CUDA C++ of the kernels and their launchers, as `cuda_source.cuda_source` returns it.
    """

    def __init__(self, source: str):
        self._device = tvm.cuda(0)
        arch = self._device.compute_version.replace(".", "")
        key = ["tests", source, arch, *compiler_version()]
        path = sealed_file(key, ".so", lambda path: compile_library(source, path, (arch,)))
        self._library = tvm_ffi.load_module(str(path))

    def get_function(self, name: str) -> Callable:
        """Return the launcher of the kernel `name`."""
        kernel = self._library.get_function(name)

        def run(*arguments) -> None:
            is_tensor = [isinstance(x, tvm.runtime.Tensor) for x in arguments]
            given = [
                x.copyto(self._device) if on_host else x
                for x, on_host in zip(arguments, is_tensor, strict=True)
            ]
            kernel(*given)
            self._device.sync()
            for argument, copy, on_host in zip(arguments, given, is_tensor, strict=True):
                if on_host:
                    argument.copyfrom(copy)

        return run


@contextlib.contextmanager
def kernels_on_gpu() -> Iterator[None]:
    """Run kernels for GPUs on the GPU within, not on the emulator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_cases, "emulated", functools.lru_cache(KernelsOnGpu))
        yield
