# SPDX-License-Identifier: Apache-2.0
"""Inputs with strides, or not aligned: kernels get compact copies, which are counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm_ffi

from ... import reference
from ...support.cases.caches.cache_cases import DIM, NUM_KV_HEADS, NUM_QO_HEADS, ROPE, CachePair
from ...support.cases.caches.mla_cache_cases import MLAPair, make_mla_cache
from ...support.emulators.python_kernels import make_cache
from ...support.worlds.permissive_steps import permissive_step


def _every_other(x: np.ndarray, axis: int) -> np.ndarray:
    shape = list(x.shape)
    shape[axis] *= 2
    where = [slice(None)] * x.ndim
    where[axis] = slice(None, None, 2)
    out = np.full(shape, np.nan, x.dtype)[tuple(where)]
    out[...] = x
    return out


def _unaligned(x: np.ndarray) -> np.ndarray:
    raw = np.empty(x.nbytes + 1, np.uint8)
    out = np.ndarray(x.shape, x.dtype, raw, offset=1)
    out[...] = x
    return out


# Each gives the same numbers.
VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rows": lambda x: _every_other(x, 0),
    "heads": lambda x: _every_other(x, 1),
    "columns": lambda x: _every_other(x, -1),
    "transposed": lambda x: np.ascontiguousarray(np.moveaxis(x, 0, -1)).transpose(
        x.ndim - 1, *range(x.ndim - 1)
    ),
    "backwards": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "unaligned": _unaligned,
}
parametrize_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


def _tensor(x: np.ndarray):
    return tvm_ffi.from_dlpack(x)


def _counted(cache, before: int, count: int) -> None:
    assert cache.stats()["copied_inputs"] == before + count


def _pair() -> CachePair:
    expected = reference.ReferenceCache(2, np.float32, ROPE, "none")
    pair = CachePair(make_cache(rope_mode=0), expected, seed=3)
    pair.add(0, 1)
    return pair


@parametrize_view
def test_attention(view):
    pair = _pair()
    cache = pair.cache
    for lengths in ([5, 2], [1, 1]):
        qkv = pair.qkv(sum(lengths))
        with cache.forward([0, 1], lengths):
            for layer in range(2):
                before = cache.stats()["copied_inputs"]
                out = cache.attention(layer, _tensor(view(qkv))).numpy()
                _counted(cache, before, 1)
                o, _ = pair.whole(layer, [0, 1], lengths, qkv)
                reference.assert_close(out, o, "float32")
    q, k, v = np.split(pair.qkv(2), [NUM_QO_HEADS, NUM_QO_HEADS + NUM_KV_HEADS], axis=1)
    qkv = np.concatenate([q, k, v], axis=1)
    with permissive_step(cache, [0, 1], [1, 1]):
        cache.attention(0, qkv)
        before = cache.stats()["copied_inputs"]
        inputs = (_tensor(view(x)) for x in (q, k, v))
        out = cache.attention_with_shared_kv(0, *inputs).numpy()
        _counted(cache, before, 3)
    o, _ = pair.whole(0, [0, 1], [1, 1], qkv)
    reference.assert_close(out, o, "float32")


@parametrize_view
def test_parts_of_attention(view):
    """self_attention, cross_attention and their merge make the whole."""
    pair = _pair()
    cache = pair.cache
    for lengths in ([5, 2], [3, 1]):
        qkv = pair.qkv(sum(lengths))
        q, k, v = np.split(qkv, [NUM_QO_HEADS, NUM_QO_HEADS + NUM_KV_HEADS], axis=1)
        with permissive_step(cache, [0, 1], lengths):
            before = cache.stats()["copied_inputs"]
            own = cache.self_attention(0, *(_tensor(view(x)) for x in (q, k, v)))
            past = cache.cross_attention(0, _tensor(view(q)))
            _counted(cache, before, 4)
            out = cache.merge_attention(*own, *past)[0].numpy()
        o, _ = pair.whole(0, [0, 1], lengths, qkv)
        reference.assert_close(out, o, "float32")


@parametrize_view
def test_mla(view, monkeypatch):
    """Return all results of the pair of MLA caches, computed from strided inputs."""
    pair = MLAPair(make_mla_cache(), seed=4)
    cache, num_copies = pair.cache, 0
    for name in ("append_mla_kv", "self_attention", "cross_attention"):
        call = getattr(type(cache), name)

        def with_strides(self, layer, *inputs, call=call, **others):
            nonlocal num_copies
            num_copies += len(inputs)
            return call(self, layer, *(_tensor(view(x)) for x in inputs), **others)

        monkeypatch.setattr(type(cache), name, with_strides)
    pair.add(0, 1)
    if view is VIEWS["heads"]:
        view = VIEWS["columns"]  # latent rows have none
    pair.step([0, 1], [3, 4], "prefill")
    pair.step([0, 1], [2, 1], "extend")
    pair.step([0, 1], [1, 1], "decode")
    assert cache.stats()["copied_inputs"] == num_copies > 0


def test_compact_inputs_are_not_copied():
    pair = _pair()
    with pair.cache.forward([0], [4]):
        pair.cache.attention(0, _tensor(pair.qkv(4)))
        pair.cache.attention(1, _tensor(pair.qkv(12)[4:8]))  # an offset
    assert pair.cache.stats()["copied_inputs"] == 0


def test_outputs_must_be_compact():
    pair = _pair()
    out = _tensor(_every_other(np.zeros((4, NUM_QO_HEADS, DIM), "float32"), 0))
    with permissive_step(pair.cache, [0], [4]):
        with pytest.raises(ValueError, match="o must be contiguous"):
            pair.cache.attention(0, pair.qkv(4), out=out)
        with pytest.raises(ValueError, match="qkv must have shape"):
            pair.cache.attention(0, _tensor(_every_other(pair.qkv(3), 0)))
    assert pair.cache.stats()["copied_inputs"] == 0


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
