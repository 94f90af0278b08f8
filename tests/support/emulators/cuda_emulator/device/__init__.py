# SPDX-License-Identifier: Apache-2.0
"""A CUDA device whose streams and kernels are emulated, for the runtime object to run on."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi

from tir_kernels.spec import CudaTarget
from tvm_pagedkv.compiler.cuda import build as cuda_build
from tvm_pagedkv.compiler.cuda import families as cuda_families
from tvm_pagedkv.compiler.cuda import library as cuda_library
from tvm_pagedkv.compiler.disk_cache import code_versions

from .. import library
from ..translate import translate

_USUAL = CudaTarget()


class EmulatedDevice:
    """``tvm.cuda(0)`` while it is plugged in."""

    def __init__(self):
        library.device()
        self.device = tvm.cuda(0)
        self.held = {cuda_library.DeviceCode("sass", 80)}  # by every library

    def __getattr__(self, name: str):
        return tvm_ffi.get_global_func(f"emulated_device.{name}")

    @contextmanager
    def counted(self) -> Iterator[Counter]:
        """Count the host's copies, events, allocations and waits within."""
        gc.collect()  # or caches of earlier tests may be freed within
        before, calls = Counter(dict(self.counts().items())), Counter()
        yield calls
        calls.update(Counter(dict(self.counts().items())) - before)

    def kernels(self, kernels: dict[str, Callable]) -> dict[str, Callable]:
        """Functions that take tensors on the host, launched as kernels of the device are.

        They only read int32 arrays.
        """
        launch = self.launch_kernel
        return {name: partial(launch, kernel) for name, kernel in kernels.items()}

    def put(self, array: np.ndarray) -> tvm.runtime.Tensor:
        """A copy on the device, which is queued; the host does not stop, as it would otherwise."""
        tensor = tvm.runtime.empty(array.shape, array.dtype, self.device)
        self.launch(lambda on_host: np.copyto(np.from_dlpack(on_host), array), tensor)
        return tensor

    @contextmanager
    def without_event(self, number: int):
        """Let nothing come of one of the next events that order streams, counted from 0."""
        self.drop_event(self.num_events() + number)
        try:
            yield
        finally:
            self.drop_event(-1)

    @contextmanager
    def without_host_waits(self):
        """Let the host go on where it should wait for a stream."""
        self.let_host_wait(False)
        try:
            yield
        finally:
            self.let_host_wait(True)


@contextmanager
def plugged_in(monkeypatch, family: CudaTarget = _USUAL):
    """The device, of a family; kernels for GPUs are compiled for it, whatever the architecture."""

    def compile_library(source: str, path: Path, archs) -> None:
        library.build(translate(source, on_device=True), path)

    device = EmulatedDevice()
    with monkeypatch.context() as patches:
        patches.setattr(cuda_families, "compile_library", compile_library)
        patches.setattr(cuda_families, "family_of", lambda arch: family)
        # On the disk these libraries must be told from real ones.
        versions = (library.runtime_path().stem, *code_versions(Path(library.__file__).parent))
        patches.setattr(
            cuda_build, "code_versions", lambda *files: (*code_versions(*files), *versions)
        )
        patches.setattr(cuda_library, "device_code", lambda path: device.held)
        device.plug_in(True)
        try:
            yield device
        finally:
            device.wait_for_all()
            device.plug_in(False)
