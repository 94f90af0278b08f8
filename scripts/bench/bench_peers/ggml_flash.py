# SPDX-License-Identifier: Apache-2.0
"""ggml's ``flash_attn_ext``, the attention of llama.cpp on CPUs, called through ctypes.

The library is the one in llama-cpp-python, compiled on this machine. K and V lie as llama.cpp's
cache keeps them, the heads of a token beside each other, in float16 or q8_0: blocks of 32 values
with a float16 scale. Queries, outputs and the causal mask are what llama.cpp passes: float32 and
float16. All sequences of a part are one operator, along ``ne[3]``. Its threads are OpenMP's.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import weakref
from pathlib import Path

import numpy as np

from bench_peers.peer import Peer, Prepared, Unsupported

F32, F16, Q8_0 = 0, 1, 8  # of ``enum ggml_type``
BLOCK, BLOCK_BYTES = 32, 34  # of q8_0
DESCRIPTOR_BYTES = 1 << 20  # tensors without their data, and the graph

_INT, _LONG, _SIZE, _FLOAT = ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float
_POINTER = ctypes.c_void_p


class InitParams(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _POINTER), ("no_alloc", ctypes.c_bool))


FUNCTIONS = {
    "ggml_version": (ctypes.c_char_p,),
    "ggml_init": (_POINTER, InitParams),
    "ggml_free": (None, _POINTER),
    "ggml_new_tensor_4d": (_POINTER, _POINTER, _INT, _LONG, _LONG, _LONG, _LONG),
    "ggml_permute": (_POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT),
    "ggml_flash_attn_ext": (_POINTER, *[_POINTER] * 5, _FLOAT, _FLOAT, _FLOAT),
    "ggml_new_graph": (_POINTER, _POINTER),
    "ggml_build_forward_expand": (None, _POINTER, _POINTER),
    "ggml_quantize_chunk": (_SIZE, _INT, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER),
    "ggml_backend_cpu_init": (_POINTER,),
    "ggml_backend_cpu_set_n_threads": (None, _POINTER, _INT),
    "ggml_backend_alloc_ctx_tensors": (_POINTER, _POINTER, _POINTER),
    "ggml_backend_buffer_free": (None, _POINTER),
    "ggml_backend_tensor_set": (None, _POINTER, _POINTER, _SIZE, _SIZE),
    "ggml_backend_tensor_get": (None, _POINTER, _POINTER, _SIZE, _SIZE),
    "ggml_backend_graph_compute": (_INT, _POINTER, _POINTER),
}


def load_library() -> ctypes.CDLL:
    """ggml with its CPU backend, all `FUNCTIONS` declared.

    Raises
    ------
    ModuleNotFoundError
        llama-cpp-python is not installed.
    OSError
        It has no shared library of the CPU backend, or that does not load.
    """
    package = importlib.util.find_spec("llama_cpp")
    if package is None:
        raise ModuleNotFoundError("No module named 'llama_cpp'")
    library = ctypes.CDLL(str(Path(package.origin).parent / "lib" / "libggml-cpu.so"))
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(library, name)  # those of libggml-base, which it needs, too
        function.restype, function.argtypes = result, arguments
    return library


def causal_mask(rows: int, context: int) -> np.ndarray:
    """Return the addend of the scores: float16 ``[rows, context]``, 0 where visible, else -inf."""
    position, row = np.arange(context), np.arange(rows)[:, None]
    return np.where(position <= context - rows + row, 0, -np.inf).astype(np.float16)


class Graph:
    """Tensors and a graph over them, in memory that goes with this object.

    Parameters
    ----------
    library : ctypes.CDLL
    backend : int
        The CPU backend, which runs the graph.
    """

    def __init__(self, library: ctypes.CDLL, backend: int):
        self.library, self.backend = library, backend
        self.context = library.ggml_init(InitParams(DESCRIPTOR_BYTES, None, True))
        weakref.finalize(self, library.ggml_free, self.context)
        self._graph = library.ggml_new_graph(self.context)
        self._inputs: list[tuple[int, np.ndarray]] = []
        self._outputs: list[tuple[int, tuple[int, ...]]] = []

    def tensor(self, kind: int, shape: tuple[int, ...], values: np.ndarray) -> int:
        """Make a tensor whose innermost extent is the last one of `shape`; `values` are its bytes.

        Parameters
        ----------
        shape : (int, int, int, int)
        """
        tensor = self.library.ggml_new_tensor_4d(self.context, kind, *reversed(shape))
        self._inputs.append((tensor, np.ascontiguousarray(values)))
        return tensor

    def heads_outside(self, tensor: int) -> int:
        """A view of ``[batch, tokens, heads, dim]`` as ``[batch, heads, tokens, dim]``."""
        return self.library.ggml_permute(self.context, tensor, 0, 2, 1, 3)

    def add_attention(self, q: int, k: int, v: int, mask: int | None, shape, scale: float) -> None:
        """Add the operator, with outputs float32 `shape`: ``[batch, rows, heads, dim]``."""
        views = [self.heads_outside(x) for x in (q, k, v)]
        output = self.library.ggml_flash_attn_ext(self.context, *views, mask, scale, 0.0, 0.0)
        self.library.ggml_build_forward_expand(self._graph, output)
        self._outputs.append((output, shape))

    def allocate(self) -> None:
        """Allocate all tensors, and set those that were made of values."""
        buffer = self.library.ggml_backend_alloc_ctx_tensors(self.context, self.backend)
        if not buffer:
            raise MemoryError("ggml could not allocate the tensors")
        weakref.finalize(self, self.library.ggml_backend_buffer_free, buffer)
        for tensor, values in self._inputs:
            self.library.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
        self._inputs.clear()

    def run(self) -> None:
        """Compute all operators."""
        status = self.library.ggml_backend_graph_compute(self.backend, self._graph)
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")

    def output(self) -> np.ndarray:
        """Return the output: float32 ``[rows of all sequences, heads, dim]``."""
        outputs = []
        for tensor, shape in self._outputs:
            values = np.empty(shape, np.float32)
            self.library.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
            outputs.append(values.reshape(-1, *shape[2:]))
        return np.concatenate(outputs)


class GgmlF16(Peer):
    """ggml's attention with K and V in float16."""

    kv_type = F16

    def __init__(self, cpus: list[int]):
        super().__init__(cpus)
        self._library = load_library()
        package = importlib.metadata.version("llama-cpp-python")
        self.version = f"ggml {self._library.ggml_version().decode()}, llama-cpp-python {package}"
        self._backend = self._library.ggml_backend_cpu_init()
        self._library.ggml_backend_cpu_set_n_threads(self._backend, len(cpus))

    def stored(self, values: np.ndarray) -> np.ndarray:
        """K or V as the cache keeps them: their bytes, in any shape."""
        if values.dtype != np.float16:
            raise Unsupported(f"its K and V are float16, not {values.dtype}")
        return values

    def prepare(self, case, inputs, dtype, heads) -> Prepared:
        graph, kv_bytes = Graph(self._library, self._backend), 0
        for q, k, v in inputs.parts():
            rows, context = q.shape[1], k.shape[1]
            stored = [self.stored(x) for x in (k, v)]
            kv_bytes += sum(x.nbytes for x in stored)
            mask = None
            if rows > 1:
                mask = graph.tensor(F16, (1, 1, rows, context), causal_mask(rows, context))
            graph.add_attention(
                graph.tensor(F32, q.shape, q.astype(np.float32)),
                *(graph.tensor(self.kv_type, k.shape, x) for x in stored),
                mask,
                q.shape,
                heads.dim**-0.5,
            )
        graph.allocate()
        num_bytes = None if self.kv_type == F16 else kv_bytes + 2 * inputs.q.nbytes
        return Prepared(graph.run, graph.output, num_bytes=num_bytes)


class GgmlQ8(GgmlF16):
    """ggml's attention with K and V in q8_0."""

    kv_type = Q8_0

    def stored(self, values):
        if values.shape[-1] % BLOCK:
            raise Unsupported(f"heads of q8_0 are multiples of {BLOCK}, not {values.shape[-1]}")
        values = np.ascontiguousarray(values, np.float32)
        stored = np.empty(values.size // BLOCK * BLOCK_BYTES, np.uint8)
        width = values.shape[-1]
        pointers = values.ctypes.data, stored.ctypes.data
        self._library.ggml_quantize_chunk(Q8_0, *pointers, 0, values.size // width, width, None)
        return stored
