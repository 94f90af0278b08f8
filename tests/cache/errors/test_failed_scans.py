# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers whose kernel fails in a step that is ended all the same."""

from __future__ import annotations

import numpy as np
import pytest

from ...support.emulators.python_kernels import make_cache


def test_a_scan_that_fails_leaves_no_state():
    """Its rows are replayed by the next step, as those of a step without the layer are."""
    fails = False

    def scan(q, pages, states, segments, rows, slots, row_ids, read_pages, write_pages, o, scale):
        """Keep the number of rows in a state."""
        if fails:
            raise RuntimeError("no scan")
        states, rows = np.from_dlpack(states), np.from_dlpack(rows)
        for i, source in enumerate(np.from_dlpack(read_pages)):
            before = states[source].copy() if source >= 0 else 0
            if rows[i + 1] > rows[i]:
                states[np.from_dlpack(write_pages)[i]] = before + rows[i + 1] - rows[i]
                counts.append(float(states[np.from_dlpack(write_pages)[i]].flat[0]))

    layer = {
        "kind": "recurrent", "num_heads": 2, "num_key_heads": 2, "key_dim": 8, "value_dim": 8,
        "decays_by_channel": False, "has_beta": False, "interval": 8, "row_width": 64,
    }  # fmt: skip
    kernels = {"recurrent_append": lambda *_: None, "copy_single_page": lambda *_: None}
    cache, counts = make_cache(kernels | {"recurrent_scan": scan}, layers=[layer]), []

    def step(seq_id: int, count: int) -> None:
        x, decay = np.zeros((count, 2, 8), "float32"), np.zeros((count, 2), "float32")
        cache.begin_forward([seq_id], [count])
        if fails:
            with pytest.raises(RuntimeError, match="no scan"):
                cache.recurrent(0, x, x, x, decay)
            with pytest.raises(ValueError, match="was called in this step already"):
                cache.recurrent(0, x, x, x, decay)
        else:
            cache.recurrent(0, x, x, x, decay)
        cache.end_forward()

    cache.add_sequence(0)
    step(0, 5)
    fails = True
    step(0, 2)
    cache.add_sequence(1)
    step(1, 8)
    fails = False
    step(0, 1)
    assert counts[-1] == 8
    cache.fork_sequence(1, 2)
    step(2, 1)
    assert counts[-1] == 9


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
