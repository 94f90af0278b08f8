# SPDX-License-Identifier: Apache-2.0
"""Windows of sequences as serving engines use them: ours, next to the cache inside apache-tvm."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from .. import reference
from ..support.cases.caches.engine_calls import (
    CACHE,
    DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_QO_HEADS,
    SM_SCALE,
    STATE,
    call,
    engine_config,
    make_engine,
)
from ..support.emulators.python_kernels import KERNELS
from ..support.emulators.stock import create_positional

BOTH = pytest.mark.parametrize("whose", ["stock", "ours"])


@BOTH
@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
@pytest.mark.parametrize("window, sinks", [(24, 4), (17, 0)])
def test_windows_as_for_mistral(whose, mode, window, sinks):
    """Given right after add_sequence; each cache as its reference says.

    The one inside apache-tvm makes "inline" of mode "normal", so sinks come nearer as the window
    slides; in ours they stay where they are in the text.
    """
    rope = pkv.RopeConfig(mode=mode)
    engine = make_engine(whose, rope=rope, sliding_window=True)
    for seq_id in (0, 1):
        engine.add(seq_id)
        engine.enable_window(seq_id, window, sinks)
    engine.add(2)
    engine.step([0, 1], [12, 9])
    for _ in range(20):
        engine.step([1, 0], [1, 1])
    engine.step([2, 0], [14, 1])
    if sinks:
        engine.fork(0, 3, 3)  # within the sinks
        engine.enable_window(3, window, sinks)
        engine.step([3, 1], [5, 1])
    engine.pop(0, 2)
    for _ in range(10):
        engine.step([0, 1, 2], [1, 1, 1])
    engine.remove(0)
    engine.step([1, 2], [1, 1])


@BOTH
@pytest.mark.parametrize("mode", ["none", "inline"])
def test_what_apache_tvm_pins(whose, mode):
    """The mask that apache-tvm's own tests demand of the stock calls, in plain NumPy.

    A row sees all that the sequence held before the step, then the rows of the step up to its own.
    After the step the sequence holds its sinks and its last positions, `window` in all.
    """
    rope = reference.Rope(rotary_dim=DIM) if mode == "inline" else None
    engine = make_engine(whose, rope=pkv.RopeConfig(mode=mode), sliding_window=True)
    rng = np.random.default_rng(0)
    windows = {0: (20, 6), 1: (25, 4), 2: (30, 8)}
    held = {}
    for seq_id, (window, sinks) in windows.items():
        call(STATE + "add_sequence", engine.cache, seq_id)
        call(CACHE + "enable_sliding_window_for_seq", engine.cache, seq_id, window, sinks)
        held[seq_id] = np.zeros((0, 2 * NUM_KV_HEADS, DIM), "float32")
    for lengths in [(4, 6, 6), (10, 9, 8), (6, 5, 4), (8, 12, 12)] + [(1, 1, 1)] * 12:
        rows = rng.standard_normal((sum(lengths), NUM_QO_HEADS + 2 * NUM_KV_HEADS, DIM))
        rows = rows.astype("float32")
        engine.begin(list(windows), lengths)
        for layer in range(NUM_LAYERS):
            out = tvm.runtime.empty((len(rows), NUM_QO_HEADS, DIM), "float32")
            attend = CACHE + "attention_with_fused_qkv"
            call(attend, engine.cache, layer, SM_SCALE, tvm.runtime.tensor(rows), out)
            for of_sequence, seq_id in zip(_split(rows, lengths), windows, strict=True):
                k_and_v = np.concatenate([held[seq_id], of_sequence[:, NUM_QO_HEADS:]])
                o = _causal_attention(of_sequence[:, :NUM_QO_HEADS], k_and_v, rope)
                got = _split(out.numpy(), lengths)[seq_id]
                reference.assert_close(got, o, "float32", f"{seq_id=} {lengths=}")
        call(STATE + "end_forward", engine.cache)
        for of_sequence, seq_id in zip(_split(rows, lengths), windows, strict=True):
            window, sinks = windows[seq_id]
            k_and_v = np.concatenate([held[seq_id], of_sequence[:, NUM_QO_HEADS:]])
            num_dropped = max(0, len(k_and_v) - window)
            held[seq_id] = np.concatenate([k_and_v[:sinks], k_and_v[sinks + num_dropped :]])
            length = call(CACHE + "get_sequence_length", engine.cache, seq_id)
            assert length == len(held[seq_id]) <= window


def _split(rows: np.ndarray, lengths: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(rows, np.cumsum(lengths)[:-1])


def _causal_attention(q: np.ndarray, k_and_v: np.ndarray, rope) -> np.ndarray:
    """Attention of the rows `q` that end ``k_and_v [S, 2 * Hk, D]``, numbered from 0."""
    k, v = k_and_v[:, :NUM_KV_HEADS], k_and_v[:, NUM_KV_HEADS:]
    positions = np.arange(len(k))
    if rope is not None:
        k = reference.rotate(k, positions, rope)
        q = reference.rotate(q, positions[-len(q) :], rope)
    mask = positions <= positions[-len(q) :, None]
    return reference.attention(q, k, v, mask, SM_SCALE)[0]


@BOTH
def test_windows_in_a_full_cache(whose):
    """Engines count no more than two pages beyond the window for each sequence."""
    window = 32
    fields = {"sliding_window": True, "prefill_chunk_size": 16, "max_total_tokens": 4 * window}
    engine = make_engine(whose, **fields)
    for seq_id in range(4):
        engine.add(seq_id)
        engine.enable_window(seq_id, window, 3)
    for seq_id in range(4):
        engine.step([seq_id], [16])
        engine.step([seq_id], [14])
    for _ in range(12):
        engine.step(range(4), [1] * 4)
        assert engine.num_available_pages > 0
    for batch, lengths in [([i], [16]) for i in range(4)] + [(range(4), [4] * 4)]:
        engine.step(batch, lengths)  # its pages are taken before the windows slide
        assert engine.num_available_pages > 0


def test_windows_beside_layers_with_windows_have_no_effect():
    """Engines give them to models as Gemma 3, whose other layers must see everything."""
    nothing = dict.fromkeys(("compact_copy", "debug_get_kv"), lambda *_: None)
    kernels = {name: tvm_ffi.convert(kernel) for name, kernel in {**nothing, **KERNELS}.items()}
    results = []
    for has_windows in (False, True):
        config = engine_config(sliding_window=has_windows, rope=pkv.RopeConfig(mode="normal"))
        cache = create_positional(config, kernels, None, kinds=(0, 3), layer_window=9)
        rng = np.random.default_rng(0)
        call(STATE + "add_sequence", cache, 0)
        call(CACHE + "enable_sliding_window_for_seq", cache, 0, 9, 2)
        for wrong in ((0, 0, 0), (0, 9, 9), (0, 9, -1)):
            with pytest.raises(ValueError, match="window|sinks"):
                call(CACHE + "enable_sliding_window_for_seq", cache, *wrong)
        for length in (20, 1, 1, 7):
            call(STATE + "begin_forward", cache, Shape([0]), Shape([length]))
            for layer in range(2):
                qkv = tvm.runtime.tensor(rng.standard_normal((length, 8, 8)).astype("float32"))
                out = tvm.runtime.empty((length, 4, 8), "float32")
                call(CACHE + "attention_with_fused_qkv", cache, layer, 0.3, qkv, out)
                results.append(out.numpy())
            call(STATE + "end_forward", cache)
        assert call(CACHE + "get_sequence_length", cache, 0) == 29
    for plain, windowed in zip(results[:8], results[8:], strict=True):
        np.testing.assert_array_equal(plain, windowed)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
