# SPDX-License-Identifier: Apache-2.0
"""Wrong calls raise errors of the right kind that name what was wrong, and change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from ...support.cases.caches.cache_cases import DIM, HEADS
from ...support.emulators.python_kernels import KERNELS, make_cache, snapshot
from ...support.worlds.permissive_steps import permissive_step

STATE, CACHE = "vm.builtin.kv_state_", "vm.builtin.attention_kv_cache_"
DISAGG = "vm.builtin.kv_cache_disagg_"


def _call(name: str, *args):
    return tvm_ffi.get_global_func(name)(*args)


@pytest.fixture
def cache():
    cache = make_cache()
    for seq_id, length in ((0, 6), (1, 4)):
        cache.add_sequence(seq_id)
        with cache.forward([seq_id], [length]):
            for layer in range(2):
                cache.attention(layer, np.ones((length, HEADS, DIM), "float32"))
    cache.fork_sequence(0, 2)
    return cache


def _qkv(num_rows: int, dtype: str = "float32") -> np.ndarray:
    return np.ones((num_rows, HEADS, DIM), dtype)


OUTSIDE = {
    "add_existing": (ValueError, "sequence 0 is in the cache", lambda c: c.add_sequence(0)),
    "add_float": (TypeError, "", lambda c: c.add_sequence(1.5)),
    "add_none": (TypeError, "", lambda c: c.add_sequence(None)),
    "add_wide": (ValueError, "64 bits", lambda c: c.add_sequence(2**63)),
    "remove_unknown": (KeyError, "no sequence 9", lambda c: c.remove_sequence(9)),
    "fork_unknown": (KeyError, "no sequence 9", lambda c: c.fork_sequence(9, 3)),
    "fork_existing": (ValueError, "sequence 1 is in", lambda c: c.fork_sequence(0, 1)),
    "fork_far": (ValueError, r"not in \[0, 6\]", lambda c: c.fork_sequence(0, 3, 7)),
    "fork_before": (ValueError, "fork position -2", lambda c: c.fork_sequence(0, 3, -2)),
    "fork_min": (ValueError, "fork position", lambda c: c.fork_sequence(0, 3, -(2**63))),
    "pop_many": (ValueError, "cannot pop 7", lambda c: c.pop_n(0, 7)),
    "pop_negative": (ValueError, "cannot pop -1", lambda c: c.pop_n(0, -1)),
    "pop_min": (ValueError, "cannot pop", lambda c: c.pop_n(0, -(2**63))),
    "pop_unknown": (KeyError, "no sequence", lambda c: c.pop_n(5, 1)),
    "length_unknown": (KeyError, "no sequence", lambda c: c.sequence_length(5)),
    "begin_unknown": (KeyError, "no sequence 5", lambda c: c.begin_forward([0, 5], [1, 1])),
    "begin_repeated": (ValueError, "twice", lambda c: c.begin_forward([0, 1, 0], [1, 1, 1])),
    "begin_zero": (ValueError, "at least 1, got 0", lambda c: c.begin_forward([0, 1], [1, 0])),
    "begin_negative": (ValueError, "at least 1", lambda c: c.begin_forward([0], [-3])),
    "begin_counts": (ValueError, "2 ids and 1", lambda c: c.begin_forward([0, 1], [1])),
    "begin_empty": (ValueError, "at least one", lambda c: c.begin_forward([], [])),
    "begin_long": (ValueError, "prefill_chunk_size", lambda c: c.begin_forward([0], [33])),
    "begin_sum": (ValueError, "prefill_chunk", lambda c: c.begin_forward([0, 1], [20, 20])),
    "begin_overflow": (
        ValueError,
        "prefill_chunk_size",
        lambda c: c.begin_forward([0, 1], [2**63 - 1, 2**63 - 1]),
    ),
    "begin_tree": (ValueError, "the parent of node 0", lambda c: c.begin_forward([0], [1], [0])),
    "begin_wide": (ValueError, "seq_ids must fit", lambda c: c.begin_forward([2**63], [1])),
    "begin_float": (TypeError, "", lambda c: c.begin_forward([0.0], [1])),
    "begin_type": (TypeError, "", lambda c: c.begin_forward(["a"], [1])),
    "end": (ValueError, "without begin_forward", lambda c: c.end_forward()),
    "attention": (ValueError, "within a step only", lambda c: c.attention(0, _qkv(1))),
    "positions": (ValueError, "within a step only", lambda c: c.query_positions()),
    "cross": (ValueError, "within a step only", lambda c: c.cross_attention(0, _qkv(1)[:, :4])),
    "get_far": (ValueError, "not within the 6", lambda c: c.debug_get_kv(0, 0, 7)),
    "get_huge": (ValueError, "not within the 6", lambda c: c.debug_get_kv(0, 0, 2**62)),
    "get_backward": (ValueError, "not within", lambda c: c.debug_get_kv(0, 3, 2)),
    "get_negative": (ValueError, "not within", lambda c: c.debug_get_kv(0, -1, 2)),
    "get_unknown": (KeyError, "no sequence", lambda c: c.debug_get_kv(7, 0, 1)),
    "set_far": (
        ValueError,
        "3 positions from 4",
        lambda c: c.debug_set_kv(0, 4, *np.ones((2, 2, 3, 2, DIM), "float32")),
    ),
    "set_max": (
        ValueError,
        "positions from",
        lambda c: c.debug_set_kv(0, 2**63 - 1, *np.ones((2, 2, 3, 2, DIM), "float32")),
    ),
    "set_heads": (
        ValueError,
        "k must have shape",
        lambda c: c.debug_set_kv(0, 0, *np.ones((2, 2, 3, 4, DIM), "float32")),
    ),
    "set_rank": (ValueError, "4 dim", lambda c: c.debug_set_kv(0, 0, *np.ones((2, 3), "float32"))),
    "window": (ValueError, "sliding_window", lambda c: c.enable_sliding_window(0, 8, 1)),
    "commit": (ValueError, "token tree nodes", lambda c: c.commit_tree([0], [0])),
    "shared": (
        ValueError,
        "within a step only",
        lambda c: c.attention_with_shared_kv(0, *np.ones((3, 1, 4, DIM), "float32"), 1.0),
    ),
    "mla": (ValueError, "append_mla", lambda c: c.append_mla_kv(0, np.ones((1, 8), "float32"))),
    "get_mla": (ValueError, "layers of kind mla", lambda c: c.debug_get_kv_mla(0)),
    "group": (IndexError, "group 1", lambda c: c.page_table(0, 1)),
    "receive_unknown": (
        KeyError,
        "no sequence 9",
        lambda c: _call(DISAGG + "prepare_recv", c, 9, 1),
    ),
    "receive_none": (ValueError, "at least 1", lambda c: _call(DISAGG + "prepare_recv", c, 0, 0)),
    "receive_min": (
        ValueError,
        "at least 1",
        lambda c: _call(DISAGG + "prepare_recv", c, 0, -(2**63)),
    ),
    "receive_max": (
        ValueError,
        r"2\^31 - 1",
        lambda c: _call(DISAGG + "prepare_recv", c, 0, 2**63 - 1),
    ),
    "receive_many": (
        pkv.CacheFullError,
        "16 pages, but 13 of 16",
        lambda c: _call(DISAGG + "prepare_recv", c, 0, 60),
    ),
    "send_nowhere": (
        ValueError,
        "no receiver 0",
        lambda c: _call(DISAGG + "mark_send", c, 0, 0, Shape([1, 0, 6]), 0),
    ),
    "copy_none": (TypeError, "three tensors", lambda c: _call("pagedkv.copy_regions", *[None] * 3)),
    "raw_none": (TypeError, "", lambda c: _call(STATE + "begin_forward", c, None, None)),
    "raw_few": (TypeError, "", lambda c: _call(STATE + "begin_forward", c, Shape([0]))),
    "raw_many": (TypeError, "", lambda c: _call(STATE + "end_forward", c, 1)),
    "raw_string": (TypeError, "", lambda c: _call(STATE + "add_sequence", c, "zero")),
    "raw_swapped": (TypeError, "", lambda c: _call(STATE + "begin_forward", c, 0, 1)),
    "get_none": (
        TypeError,
        "k must be a tensor",
        lambda c: _call(CACHE + "debug_get_kv", c, 0, 0, 1, None, None),
    ),
    "set_none": (
        ValueError,
        "k must be a tensor",
        lambda c: _call("pagedkv.debug_set_kv", c, 0, 0, None, None),
    ),
}


@pytest.mark.parametrize("name", list(OUTSIDE))
def test_outside_a_step(cache, name):
    error, text, call = OUTSIDE[name]
    before = snapshot(cache, [0, 1, 2])
    with pytest.raises(error, match=text or None):
        call(cache)
    assert snapshot(cache, [0, 1, 2]) == before
    cache.check_integrity()


def _raw_attention(cache, qkv, out):
    return _call(CACHE + "attention_with_fused_qkv", cache, 0, 1.0, qkv, out)


def _out(num_rows: int = 3, dtype: str = "float32"):
    return tvm.runtime.empty((num_rows, 4, DIM), dtype)


INSIDE = {
    "begin": (ValueError, "within a step", lambda c: c.begin_forward([0], [1])),
    "add": (ValueError, "within a step", lambda c: c.add_sequence(7)),
    "remove": (ValueError, "within a step", lambda c: c.remove_sequence(0)),
    "fork": (ValueError, "within a step", lambda c: c.fork_sequence(0, 7)),
    "pop": (ValueError, "within a step", lambda c: c.pop_n(0, 1)),
    "clear": (ValueError, "within a step", lambda c: c.clear()),
    "set": (
        ValueError,
        "within a step",
        lambda c: c.debug_set_kv(0, 0, *np.ones((2, 2, 1, 2, DIM), "float32")),
    ),
    "rows": (ValueError, r"\[3, 8, 8\], got \[4, 8, 8\]", lambda c: c.attention(0, _qkv(4))),
    "rank": (ValueError, "qkv must have shape", lambda c: c.attention(0, np.ones((3, 64), "f4"))),
    "dtype": (ValueError, "float32, got float64", lambda c: c.attention(0, _qkv(3, "float64"))),
    "layer": (IndexError, "layer 2", lambda c: c.attention(2, _qkv(3))),
    "layer_negative": (IndexError, "layer -1", lambda c: c.attention(-1, _qkv(3))),
    "no_tensor": (TypeError, "qkv must be a tensor", lambda c: c.attention(0, "qkv")),
    "none": (TypeError, "qkv must be a tensor", lambda c: _raw_attention(c, None, _out())),
    "out_none": (
        TypeError,
        "o must be a tensor",
        lambda c: _raw_attention(c, tvm.runtime.tensor(_qkv(3)), None),
    ),
    "out_rows": (ValueError, "o must have shape", lambda c: c.attention(0, _qkv(3), out=_out(2))),
    "out_dtype": (
        ValueError,
        "o must be float32",
        lambda c: c.attention(0, _qkv(3), out=_out(3, "float16")),
    ),
    "strided": (
        ValueError,
        "o must be contiguous",
        lambda c: _raw_attention(
            c, tvm.runtime.tensor(_qkv(3)), tvm_ffi.from_dlpack(_out(6).numpy()[::2])
        ),
    ),
    "lse": (
        ValueError,
        "lse must be float32",
        lambda c: _call(
            CACHE + "cross_attention", c, 0, 1.0, _out(), _out(),
            tvm.runtime.empty((3, 4), "float16"),
        ),
    ),
    "kernel": (ValueError, "without the kernel 'merge'", lambda c: _merge(c, (3, 4, 8), (3, 4))),
    "merge_rank": (ValueError, "o must have shape", lambda c: _merge(c, (3, 4), (3, 4))),
    "merge_lse": (ValueError, "lse must have shape", lambda c: _merge(c, (3, 4, 8), (3, 5))),
}  # fmt: skip


def _merge(cache, shape, lse_shape):
    o, lse = (tvm.runtime.empty(s, "float32") for s in (shape, lse_shape))
    return cache.merge_attention(o, lse, o, lse)


@pytest.mark.parametrize("name", list(INSIDE))
def test_within_a_step(name):
    cache = make_cache({"merge": None})
    for seq_id in (0, 1):
        cache.add_sequence(seq_id)
    with permissive_step(cache, [0, 1], [2, 1]):
        error, text, call = INSIDE[name]
        before = snapshot(cache, [0, 1])
        with pytest.raises(error, match=text):
            call(cache)
        assert snapshot(cache, [0, 1]) == before
        cache.check_integrity()
    assert not cache.is_in_forward


def test_end_forward_runs_when_the_body_raises(cache):
    with pytest.raises(ZeroDivisionError), cache.forward([0], [1]):
        raise ZeroDivisionError
    assert not cache.is_in_forward


def test_a_step_of_too_many_sequences():
    """Any number of sequences may exist."""
    cache = make_cache(max_num_sequences=2)
    for seq_id in range(4):
        cache.add_sequence(seq_id)
    cache.fork_sequence(0, 4)
    before = snapshot(cache, range(5))
    message = r"the step has 3 sequences, more than max_num_sequences \(2\)"
    with pytest.raises(ValueError, match=message):
        cache.begin_forward([0, 3, 4], [1, 1, 1])
    assert snapshot(cache, range(5)) == before
    with permissive_step(cache, [3, 4], [1, 1]):
        pass


def test_cache_full(cache):
    cache.add_sequence(3)
    for _ in range(2):  # 64 slots, of which 3 pages are in use
        with permissive_step(cache, [3], [24]):
            pass
    before = snapshot(cache, [0, 1, 2, 3])
    message = (
        r"needs 5 pages, but 1 of 16 are available; most are held by "
        r"sequence 3 \(12\), 2 \(2\), 0 \(2\)"
    )
    with pytest.raises(pkv.CacheFullError, match=message):
        cache.begin_forward([3, 1], [16, 1])
    assert issubclass(pkv.CacheFullError, RuntimeError)
    assert snapshot(cache, [0, 1, 2, 3]) == before
    cache.check_integrity()
    with permissive_step(cache, [1], [4]):
        pass
    with pytest.raises(pkv.CacheFullError):  # a copy needs a page too
        cache.begin_forward([2], [1])
    cache.remove_sequence(2)
    with permissive_step(cache, [0], [2]):
        pass


def _misaligned(num_heads: int) -> np.ndarray:
    """Zeros of a row that start 4 bytes past a multiple of 64."""
    raw = np.zeros(2 * num_heads * DIM + 32, "float32")
    start = (-raw.ctypes.data // 4) % 16 + 1
    return raw[start : start + num_heads * DIM].reshape(1, num_heads, DIM)


def test_stock_kernels_need_aligned_tensors():
    tagged = {name: ["tirx", kernel] for name, kernel in KERNELS.items()}
    cache = make_cache(tagged)
    cache.add_sequence(0)
    qkv = tvm_ffi.from_dlpack(_misaligned(HEADS))
    with permissive_step(cache, [0], [1]):
        with pytest.raises(ValueError, match="o must start at a multiple of 64 bytes"):
            _raw_attention(cache, qkv, tvm_ffi.from_dlpack(_misaligned(4)))
        assert cache.stats()["copied_inputs"] == 0
        _raw_attention(cache, qkv, _out(1))  # inputs are copied to where they are aligned
        assert cache.stats()["copied_inputs"] == 1


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
