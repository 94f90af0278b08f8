# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's functions under the runtime object: in NumPy, and recorded beside stock TVM."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_pagedkv as pkv

from .. import reference
from ..support.cases.caches.cache_cases import PlainPair
from ..support.emulators.flashinfer_functions import Recorder
from ..support.emulators.python_kernels import KERNELS, LAYER, MLA_KERNELS, MLA_LAYER, make_cache
from ..support.emulators.stock import create_positional, stock_kernels

NAMES = ("prefill_ragged", "prefill", "decode")


def flashinfer_cache(recorder: Recorder, **fields) -> pkv.KVCache:
    return make_cache({name: recorder.kernel(name) for name in NAMES}, **fields)


def names_of(calls) -> list[str]:
    return [call.name for call in calls]


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("aux_manager", ["merged", "plain"])
def test_steps_agree_with_the_reference(aux_manager, seed):
    recorder = Recorder()
    cache = flashinfer_cache(recorder, aux_manager=aux_manager, rope_mode=1)
    pair = PlainPair(cache, "normal", seed=seed)
    pair.add(0, 1, 2)
    for seq_ids, lengths in (
        ([0], [9]),
        ([2, 0, 1], [5, 1, 3]),
        ([1, 2], [1, 1]),
        ([0, 1, 2], [2, 1, 1]),
    ):
        pair.step(seq_ids, lengths)
        kernel = "decode" if set(lengths) == {1} else "prefill"
        assert names_of(recorder.take()) == [f"{kernel} plan", *[f"{kernel} run"] * 2]
    pair.fork(0, 3, 6)
    pair.step([3, 0], [1, 1])
    pair.check_rows()


@pytest.mark.parametrize("lengths", [[3, 4], [1, 1]], ids=str)
def test_self_and_cross_attention_and_their_merge(lengths):
    recorder = Recorder()
    cache = flashinfer_cache(recorder)
    pair, rng = PlainPair(cache), np.random.default_rng(0)
    pair.add(0, 1)
    pair.step([0], [6])  # sequence 1 has no past
    recorder.take()
    num_rows = sum(lengths)
    with cache.forward([0, 1], lengths):
        for layer in range(2):
            qkv = rng.standard_normal((num_rows, 8, 8)).astype("float32")
            q, k, v = (np.ascontiguousarray(x) for x in (qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]))
            o, lse = cache.self_attention(layer, q, k, v)
            o_past, lse_past = cache.cross_attention(layer, q)
            cache.merge_attention(o, lse, o_past, lse_past)
            expected, _ = pair.expected.attention(layer, [0, 1], lengths, qkv, 2, 8**-0.5)
            reference.assert_close(o.numpy(), expected, "float32")
    cross = "decode" if lengths == [1, 1] else "prefill"
    order = ["prefill_ragged plan", "prefill_ragged run", f"{cross} plan", f"{cross} run"]
    assert names_of(calls := recorder.take()) == [*order, order[1], order[3]]
    workspaces = {call.arguments["int_workspace"].data_ptr() for call in calls}
    assert len(workspaces) == 2  # both plans are alive


def test_each_group_of_layers_has_its_plan():
    recorder = Recorder()
    layers = [LAYER, {**LAYER, "num_qo_heads": 6}, LAYER]
    cache = flashinfer_cache(recorder, layers=layers)
    cache.add_sequence(0)
    for _ in range(2):
        with cache.forward([0], [3]):
            for layer in range(3):
                heads = layers[layer]["num_qo_heads"] + 4
                cache.attention(layer, np.zeros((3, heads, 8), "float32"))
        calls = recorder.take()
        kinds = ["plan", "run", "plan", "run", "run"]
        assert names_of(calls) == [f"prefill {kind}" for kind in kinds]
        assert [c.arguments["num_qo_heads"] for c in calls if "plan" in c.name] == [4, 6]


def test_layers_with_other_functions_are_planned_by_them():
    recorders = Recorder(), Recorder()
    kernels = []
    for recorder in recorders:
        named = {name: recorder.kernel(name) for name in NAMES}
        kernels.append({**KERNELS, **named})
    layers = [{**LAYER, "kernel_set": i} for i in range(2)]
    cache = make_cache(kernels, layers=layers)
    cache.add_sequence(0)
    with cache.forward([0], [3]):
        for layer in range(2):
            cache.attention(layer, np.zeros((3, 8, 8), "float32"))
    for recorder in recorders:
        assert names_of(recorder.take()) == ["prefill plan", "prefill run"]


def test_a_plan_that_fails_is_made_again():
    recorder = Recorder()
    tag, run, plan = recorder.kernel("prefill")
    failures = [RuntimeError("no plan today")]

    def fail_once(*arguments):
        if failures:
            raise failures.pop()
        return plan(*arguments)

    cache = make_cache({"prefill": [tag, run, tvm_ffi.convert(fail_once)]})
    pair = PlainPair(cache)
    pair.add(0)
    cache.begin_forward([0], [3])
    with pytest.raises(RuntimeError, match="no plan today"):
        cache.attention(0, np.zeros((3, 8, 8), "float32"))
    cache.end_forward()
    cache.pop_n(0, 3)
    pair.step([0], [5])
    assert names_of(recorder.take()) == ["prefill plan", *["prefill run"] * 2]


def test_mla_layers_are_refused():
    kernels = {**MLA_KERNELS, "prefill_ragged": Recorder().kernel("prefill_ragged")}
    with pytest.raises(ValueError, match="not MLA layers"):
        make_cache(kernels, layers=[MLA_LAYER])


# --- beside the cache inside apache-tvm ---------------------------------------------------------

CONFIG = pkv.KVCacheConfig(
    num_layers=2,
    num_qo_heads=4,
    num_kv_heads=2,
    qk_head_dim=16,
    dtype="float32",
    page_size=16,
    max_num_sequences=4,
    max_total_tokens=256,
    prefill_chunk_size=64,
    rope=pkv.RopeConfig(mode="normal", theta=5000.0, scale=0.5),
)


def call(name: str, *arguments):
    return tvm.get_global_func(f"vm.builtin.{name}")(*arguments)


def tensor(*shape):
    return tvm.runtime.tensor(np.ones(shape, "float32"))


def drive(recorder: Recorder, api: str) -> list:
    """Calls of some steps of a cache made by the positional constructor; `api` is the layers'."""
    kernels = stock_kernels(4, 2, 16, "float32")
    cache = create_positional(
        CONFIG, {**kernels, **{n: recorder.kernel(n)[1:] for n in NAMES}}, "flashinfer"
    )
    for seq_id in range(2):
        call("kv_state_add_sequence", cache, seq_id)
    calls = []
    for seq_ids, lengths in (([0], [20]), ([1], [5]), ([0, 1], [3, 2]), ([1, 0], [1, 1])):
        num_rows = sum(lengths)
        begin = tvm_ffi.Shape(seq_ids), tvm_ffi.Shape(lengths)
        call("kv_state_begin_forward", cache, *begin)
        for layer in range(2):
            q, k, v = (tensor(num_rows, n, 16) for n in (4, 2, 2))
            o, lse = tensor(num_rows, 4, 16), tensor(num_rows, 4)
            if api == "fused":
                qkv = tensor(num_rows, 8, 16)
                call("attention_kv_cache_attention_with_fused_qkv", cache, layer, 0.25, qkv, o)
            else:
                call("attention_kv_cache_self_attention", cache, layer, 0.25, q, k, v, o, lse)
                call("attention_kv_cache_cross_attention", cache, layer, 0.25, q, o, lse)
        call("kv_state_end_forward", cache)
        calls.append({c.name: c.summary() for c in recorder.take()})
    return calls


@pytest.fixture
def both():
    def run(api: str):
        ours = drive(Recorder(computes=False), api)
        pkv.use_stock_runtime()
        try:
            return ours, drive(Recorder(computes=False), api)
        finally:
            pkv.use_pagedkv_runtime()

    return run


def test_decode_is_called_as_stock_tvm_calls_it(both):
    ours, stock = both("fused")
    assert list(ours[3]) == ["decode plan", "decode run"]
    assert ours[3] == stock[3]


def test_self_and_cross_are_called_as_stock_tvm_calls_them(both):
    ours, stock = both("parts")
    assert len(ours[2]) == 4 and ours[2] == stock[2]
    # With one row each, stock TVM's cross attention sees that row too, and self attention runs with
    # a plan of an earlier step.
    assert set(ours[3]) == {*stock[3], "prefill_ragged plan"}
    assert ours[3]["decode plan"] == stock[3]["decode plan"]
    runs = [calls[3]["decode run"] for calls in (ours, stock)]
    assert [run.pop("last_page_len") for run in runs] == [[7, 7], [8, 8]]
    assert runs[0] == runs[1]


def test_prefill_over_pages_differs_from_stock_tvm_in_what_it_attends_to(both):
    """Stock TVM attends to this step's rows apart from the past; here the pages hold both."""
    ours, stock = both("fused")
    plan, run = ours[2]["prefill plan"], ours[2]["prefill run"]
    for own, theirs, differing in (
        (plan, stock[2]["prefill plan"], {"kv_lens", "causal"}),
        (run, stock[2]["prefill run"], {"mask_mode", "last_page_len"}),
    ):
        assert {name for name in own if own[name] != theirs[name]} == differing
    assert (plan["kv_lens"], plan["causal"]) == ([23, 7], (bool, True))
    assert (run["mask_mode"], run["last_page_len"]) == ((int, 1), [7, 7])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
