# SPDX-License-Identifier: Apache-2.0
"""Our kernels, and those inside apache-tvm, on the same pages; begin_forward of both runtimes."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

import tvm
from lib import balance
from lib.cases import PagedInputs

from bench_peers import begin_forward
from bench_peers.peer import Peer, Prepared
from tir_kernels import build_kernel
from tir_kernels.codec import codec_of
from tvm_pagedkv import KVCacheConfig, use_stock_runtime
from tvm_pagedkv.compiler.build import kernel_spec, load_kernels, resolve_target
from tvm_pagedkv.compiler.disk_cache import code_versions
from tvm_pagedkv.measure import READ_BYTES, Limits
from tvm_pagedkv.threads import set_num_threads

KERNELS = ("prefill", "decode")
READS = 5  # the best of which tells what the machine reads just now


class TvmPeer(Peer):
    """Kernels that TVM compiles and its thread pool runs."""

    tag: str
    kv_dtype: str | None = None  # None: as the case's type

    def __init__(self, cpus: list[int]):
        set_num_threads(len(cpus))
        self.cpus = cpus
        self._limits = Limits()

    def flush(self) -> None:
        self._limits.read()

    def prepare(self, case, inputs, dtype, heads) -> Prepared:
        if case.kind == "begin_forward":
            kernels = self.kernels(begin_forward.SMALL, "float32", begin_forward.KERNELS)
            return begin_forward.prepare_begin_forward(kernels, self.tag, case.batch)
        paged = PagedInputs(case, dtype, heads, inputs, codec_of(self.kv_dtype or dtype))
        kernel = self.kernels(heads, dtype)[case.kind]
        return Prepared(
            functools.partial(kernel, *paged.arguments),
            paged.output.numpy,
            apart=functools.partial(self.apart, case.kind, dtype, heads, paged.arguments),
            num_bytes=paged.num_bytes if self.kv_dtype else None,
        )

    def apart(self, kind, dtype, heads, arguments) -> float | None:
        """Return how far apart threads finish, where the kernels can tell."""
        return None

    @abstractmethod
    def kernels(self, heads, dtype, names=KERNELS) -> Mapping[str, tvm.ffi.Function]:
        """Functions for each of `names`."""


class Ours(TvmPeer):
    """Our kernels; they also measure the machine's limits."""

    tag = None
    cpu = "native"

    @functools.cache  # noqa: B019  (lives as long as the process)
    def kernels(self, heads, dtype, names=KERNELS, *, stamped=False):
        shape = (heads.query, heads.kv, heads.dim)
        config = KVCacheConfig(1, *shape, dtype=dtype, kv_dtype=self.kv_dtype).resolved()
        target = resolve_target(self.cpu)
        spec = kernel_spec(config, config.layers[0], target)
        key = (f"{heads.label}, {dtype}, {config.kv_dtype}", repr(spec))
        if stamped:
            key += ("stamped", *code_versions(Path(balance.__file__)))

        def build(name):
            kernel = build_kernel(name, spec)
            return balance.stamped(kernel) if stamped else kernel

        builders = {name: functools.partial(build, name) for name in names}
        return load_kernels(builders, key, target)

    def apart(self, kind, dtype, heads, arguments):
        kernel = self.kernels(heads, dtype, stamped=True)[kind]
        return balance.apart(kernel, arguments, self.flush, len(self.cpus))

    def read_bandwidth(self) -> float:
        """Bytes per second that can be read just now."""
        return max(self._limits.read() for _ in range(READS))

    def limits(self):
        self._limits.read()
        rates = {
            "read": READ_BYTES / min(self._limits.read_times),
            "float32": self._limits.peak("float32"),
            "bfloat16": self._limits.peak("bfloat16"),
        }
        self._limits.read_times.clear()
        return rates


class OursAvx2(Ours):
    """The same, for CPUs without AVX-512."""

    cpu = "x86-64-v3"


class OursInt8(Ours):
    """Our kernels over quantized pages."""

    kv_dtype = "int8"


class OursFp8(Ours):
    """Our kernels over quantized pages."""

    kv_dtype = "float8_e4m3fn"


class OursInt5(Ours):
    """With quantized pages."""

    kv_dtype = "int5"


class OursInt4(Ours):
    """Our kernels over quantized pages."""

    kv_dtype = "int4"


class OursInt8Int4(Ours):
    """With pages of K and of V quantized apart."""

    kv_dtype = "int8,int4"


class OursInt5Int4(Ours):
    """With pages of K and of V quantized apart."""

    kv_dtype = "int5,int4"


class Stock(TvmPeer):
    """The kernels inside apache-tvm."""

    tag = "tirx"
    version = f"apache-tvm {tvm.__version__}"

    def __init__(self, cpus: list[int]):
        super().__init__(cpus)
        use_stock_runtime()

    @functools.cache  # noqa: B019  (lives as long as the process)
    def kernels(self, heads, dtype, names=KERNELS):
        from tests.support.emulators.stock import stock_kernels

        shape = (heads.query, heads.kv, heads.dim, dtype)
        return stock_kernels(*shape, target=resolve_target(), only=names)
