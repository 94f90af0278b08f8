# SPDX-License-Identifier: Apache-2.0
"""The peer ggml, as far as it goes without its library."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from .. import reference

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
from bench_peers import PEERS, ggml_flash
from bench_peers.peer import Unsupported
from lib.cases import Case, Heads, Inputs


@pytest.mark.parametrize(("rows", "context"), [(1, 7), (5, 5), (3, 40)])
def test_the_mask_hides_what_comes_later(rows, context):
    mask = ggml_flash.causal_mask(rows, context)
    assert mask.dtype == np.float16
    np.testing.assert_array_equal(mask == 0, reference.causal_mask(rows, context))
    assert np.all(np.isneginf(mask) | (mask == 0))


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    package = importlib.machinery.ModuleSpec("llama_cpp", None, origin=str(tmp_path / "x.py"))
    monkeypatch.setattr(importlib.util, "find_spec", {"llama_cpp": None}.get)
    with pytest.raises(ModuleNotFoundError, match="'llama_cpp'"):
        ggml_flash.load_library()
    monkeypatch.setattr(importlib.util, "find_spec", {"llama_cpp": package}.get)
    with pytest.raises(OSError, match="libggml-cpu.so"):
        ggml_flash.load_library()


class Library:
    """ggml's functions over NumPy arrays: a tensor is the index of one, innermost extent last."""

    TYPES = {ggml_flash.F32: np.float32, ggml_flash.F16: np.float16}

    def __init__(self):
        self.tensors = {}

    def _add(self, values: np.ndarray) -> int:
        self.tensors[len(self.tensors) + 1] = values
        return len(self.tensors)

    def ggml_version(self):
        return b"0"

    def ggml_new_tensor_4d(self, context, kind, *extents):
        return self._add(np.empty(extents[::-1], self.TYPES[kind]))

    def ggml_permute(self, context, tensor, *axes):
        assert axes == (0, 2, 1, 3)
        return self._add(self.tensors[tensor].swapaxes(1, 2))

    def ggml_flash_attn_ext(self, context, q, k, v, mask, scale, max_bias, softcap):
        q, k, v = (self.tensors[x] for x in (q, k, v))
        self.operator = q, k, v, self.tensors.get(mask), scale
        return self._add(np.zeros((q.shape[0], q.shape[2], q.shape[1], q.shape[3]), np.float32))

    def ggml_backend_tensor_set(self, tensor, pointer, offset, size):
        assert offset == 0 and size == self.tensors[tensor].nbytes
        source = (ctypes.c_uint8 * size).from_address(pointer)
        self.tensors[tensor].reshape(-1).view(np.uint8)[:] = source

    def ggml_backend_tensor_get(self, tensor, pointer, offset, size):
        self.ggml_backend_graph_compute(0, 0)
        values = np.ascontiguousarray(self.result, np.float32)
        assert values.nbytes == size
        ctypes.memmove(pointer, values.ctypes.data, size)

    def ggml_backend_graph_compute(self, backend, graph):
        q, k, v, mask, scale = self.operator
        group = q.shape[1] // k.shape[1]
        k, v = (np.repeat(x.astype(np.float64), group, 1) for x in (k, v))
        scores = q @ k.swapaxes(2, 3) * scale + (0 if mask is None else mask)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        self.result = (weights @ v / weights.sum(-1, keepdims=True)).swapaxes(1, 2)
        return 0

    def __getattr__(self, name):
        if name not in ggml_flash.FUNCTIONS:
            raise AttributeError(name)
        return lambda *arguments: 1


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.setattr(ggml_flash, "load_library", Library)
    monkeypatch.setattr(ggml_flash.importlib.metadata, "version", lambda name: "0")
    return ggml_flash.GgmlF16([0])


@pytest.mark.parametrize("case", [Case("decode", 3, 1, 20), Case("prefill", 2, 5, 9)])
def test_the_operator_gets_the_case(case, peer):
    heads = Heads(6, 2, 16)
    inputs = Inputs(case, "float16", heads)
    prepared = peer.prepare(case, inputs, "float16", heads)
    prepared.run()
    assert inputs.error(prepared.output()) < 1e-6


def test_what_the_types_cannot_hold_is_unsupported(peer, monkeypatch):
    case, heads = Case("decode", 1, 1, 8), Heads(2, 1, 16)
    with pytest.raises(Unsupported, match="float32"):
        peer.prepare(case, Inputs(case, "float32", heads), "float32", heads)
    with pytest.raises(Unsupported, match="multiples of 32"):
        ggml_flash.GgmlQ8([0]).prepare(case, Inputs(case, "float16", heads), "float16", heads)
    assert {"ggml f16", "ggml q8_0"} <= set(PEERS)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
