# SPDX-License-Identifier: Apache-2.0
"""What serving engines call, in the ways they call it: ours, next to the cache inside apache-tvm.

The sequences of calls are those of mlc-llm's engine: prefill in chunks beside decode, forks and
rollbacks of a prefix cache, token trees of speculative decoding, windows with sinks.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm_ffi import Shape

import tvm_pagedkv as pkv
from tvm_pagedkv.transfer import _runtime

from ..relax.test_frontend import export_model
from ..support.engine_calls import CACHE, DIM, NUM_LAYERS, STATE, call, engine_config, make_engine
from ..support.python_kernels import KERNELS, view
from ..support.python_tree_kernels import KERNELS_WITH_TREES
from ..support.stock import create_positional

BOTH = pytest.mark.parametrize("whose", ["stock", "ours"])


def _double():
    """A Relax function of an int32 vector."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((tvm.tirx.Var("n", "int64"),), "int32"))
    with builder.function("double", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(relax.op.add(x, x)))
        builder.emit_func_output(out)
    return builder.get()["double"]


# --- creation -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> relax.VirtualMachine:
    """A compiled model whose function `create` makes the cache."""
    module = export_model(pkv.PagedKVCache)
    return relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())


@pytest.mark.parametrize("has_windows", [0, 1])
def test_creation_from_five_shapes_of_one_number(model, has_windows):
    """Sequences, tokens, chunk, page size, sliding window; the pages are those of the stock cache.

    An engine admits requests by the pages that are available, and lets a sequence grow to
    max_total_tokens: without a page more than these need it would stop one page before.
    """
    cache = model["create"](*(Shape([n]) for n in (3, 100, 32, 16, has_windows)))
    described = cache.description
    sizes = ("max_num_sequences", "max_total_tokens", "prefill_chunk_size", "page_size")
    assert [described[name] for name in sizes] == [3, 100, 32, 16]
    assert described["sliding_window"] == bool(has_windows)
    fields = {"sliding_window": bool(has_windows), "page_size": 16, "max_num_sequences": 3}
    stock = make_engine("stock", max_total_tokens=100, **fields)
    expected = 7 + 1 + 2 * 3 * has_windows
    assert stock.num_available_pages == cache.num_available_pages() == expected


def test_another_page_size_than_the_compiled_one(model):
    message = (
        r"compiled for pages of 16 slots, but page_size is 32: create the cache with page_size "
        r"16, or compile the model with kernel_page_size=32"
    )
    with pytest.raises(ValueError, match=message):
        model["create"](*(Shape([n]) for n in (3, 100, 32, 32, 0)))


# --- sequences and steps ------------------------------------------------------------------------


@BOTH
def test_steps_that_mix_prefill_and_decode(whose):
    """Hybrid prefill: rows of running sequences beside chunks of new ones, in any order."""
    engine = make_engine(whose)
    engine.add(0, 1)
    engine.step([0], [20])
    engine.step([0, 1], [1, 31])
    engine.step([1, 0], [5, 1])
    for _ in range(5):
        engine.step([0, 1], [1, 1])
    engine.add(2, 3)
    engine.step([2, 0, 3, 1], [12, 1, 17, 1])
    engine.step([0, 1, 2, 3], [1, 1, 1, 1])
    engine.remove(0, 2)
    engine.step([3, 1], [1, 1])
    engine.clear()
    assert call(CACHE + "empty", engine.cache)
    engine.add(0)
    engine.step([0], [9])


@BOTH
def test_pages_that_are_available(whose):
    """Along the way: they fall by what sequences take, and come back when these go."""
    engine = make_engine(whose)
    available = [engine.num_available_pages]
    engine.add(0, 1)
    for seq_ids, lengths in (([0], [8]), ([0], [1]), ([1, 0], [3, 3]), ([1], [1]), ([1], [1])):
        engine.step(seq_ids, lengths)
        available.append(engine.num_available_pages)
    engine.pop(0, 4)
    available.append(engine.num_available_pages)
    engine.remove(1)
    available.append(engine.num_available_pages)
    engine.clear()
    available.append(engine.num_available_pages)
    assert available == [65, 63, 62, 61, 61, 60, 61, 63, 65]


@BOTH
def test_a_sequence_may_fill_the_cache(whose):
    """With max_total_tokens in one sequence an engine still sees a page, so it goes on to there."""
    engine = make_engine(whose, max_total_tokens=64)
    engine.add(0)
    engine.step([0], [32])
    engine.step([0], [31])
    assert engine.num_available_pages >= 1
    engine.step([0], [1])
    assert engine.total_length == 64


# --- a prefix cache -----------------------------------------------------------------------------


@BOTH
def test_finished_sequences_stay_beside_the_running_ones(whose):
    """max_num_sequences bounds the batch; a prefix cache keeps as many finished ones and more."""
    engine = make_engine(whose)  # 4
    for first in (0, 4, 8):
        batch = list(range(first, first + 4))
        engine.add(*batch)
        engine.step(batch, [7, 5, 8, 3])
        engine.step(batch, [1] * 4)
    assert len(engine.expected.sequences) == 12
    # A match with a finished sequence: part of it is forked, the rest is computed.
    for parent, position in ((2, 6), (5, 4), (0, 8), (8, 1)):
        child = 100 + parent
        engine.fork(parent, child, position)
    engine.step([102, 105, 100, 108], [4, 1, 2, 6])
    engine.step([105, 102, 108, 100], [1] * 4)
    # A finished one is used again: rolled back to the match and continued.
    engine.pop(4, 3)
    engine.step([4, 105], [9, 1])
    engine.remove(*range(4))  # the oldest ones go
    engine.step([100, 102], [1, 1])


def test_too_many_sequences_in_a_step():
    """Both numbers are in the message, and nothing has changed."""
    engine = make_engine("ours")
    engine.add(*range(5))
    with pytest.raises(ValueError, match=r"has 5 sequences, more than max_num_sequences \(4\)"):
        engine.begin(range(5), [1] * 5)
    engine.check()
    engine.step(range(4), [1] * 4)


@BOTH
def test_forks_and_pops_around_each_other(whose):
    engine = make_engine(whose)
    engine.add(0)
    engine.step([0], [21])
    engine.fork(0, 1, 13)  # within a page
    engine.fork(0, 2, 16)  # at a page's end
    engine.remove(0)
    engine.fork(1, 3)  # right after a removal, with the number of nobody
    engine.fork(2, 0, 8)  # and with the number that was removed
    engine.check()
    engine.pop(3, 2)  # what was forked
    engine.pop(2, 7)
    engine.pop(0, 0)
    engine.check()
    engine.step([3, 2, 0, 1], [1, 5, 2, 1])
    engine.pop(1, 14)  # everything
    engine.step([1, 3], [3, 1])
    engine.fork(3, 7, 0)  # nothing
    engine.step([7, 0], [2, 1])


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_random_calls(whose, seed):
    """Forks at any position, pops, removals and mixed steps; the reference knows what is right."""
    rng = np.random.default_rng(seed)
    print("seed", seed)
    engine = make_engine(whose)
    next_id = 0
    for _ in range(60):
        ids = list(engine.expected.sequences)
        long_ids = [i for i in ids if engine.expected.length(i) > 1]
        draw = rng.random()
        if len(ids) < 2 or (draw < 0.15 and len(ids) < 9):
            engine.add(next_id)
            next_id += 1
        elif draw < 0.3 and long_ids and len(ids) < 9:
            parent = int(rng.choice(long_ids))
            engine.fork(parent, next_id, int(rng.integers(1, engine.expected.length(parent))))
            next_id += 1
        elif draw < 0.4 and long_ids:
            seq_id = int(rng.choice(long_ids))
            engine.pop(seq_id, int(rng.integers(1, engine.expected.length(seq_id))))
        elif draw < 0.5 and len(ids) > 4:
            engine.remove(int(rng.choice(ids)))
        elif engine.total_length < 120:
            batch = rng.permutation(ids)[: rng.integers(1, 5)].tolist()
            lengths = [int(n) for n in rng.choice([1, 1, 1, 3, 7], len(batch))]
            engine.step(batch, lengths)
        else:
            engine.remove(max(ids, key=engine.expected.length))
        engine.check()


# --- token trees --------------------------------------------------------------------------------

TREE = ([5, 3], [-1, 0, 0, 1, 1, -1, 0, 0])
LEAVES = [3, 2]


def test_trees_of_speculative_decoding():
    """Nodes count in the lengths until a commit, which keeps the path to a leaf."""
    engine = make_engine("ours", KERNELS_WITH_TREES)
    engine.add(0, 1)
    engine.step([0, 1], [9, 14])
    engine.step([1, 0], *TREE)
    assert engine.total_length == 9 + 14 + 8
    engine.commit([1, 0], LEAVES)
    assert engine.total_length == 14 + 3 + 9 + 2
    engine.step([0, 1], [1, 1])
    engine.step([0], [4], [-1, 0, 1, 2])  # a chain
    engine.commit([0], [-1])  # nothing of it
    engine.step([0, 1], [2, 1])


@BOTH
def test_uncommitted_nodes(whose):
    """They count in both lengths; plain steps and forks are refused on them, removal is not."""
    engine = make_engine(whose, KERNELS_WITH_TREES)
    engine.add(0, 1, 2)
    engine.step([0, 1], [9, 14])
    available = engine.num_available_pages
    engine.begin([0, 1], *TREE)
    call(STATE + "end_forward", engine.cache)
    engine.expected.grow_trees([0, 1], *TREE)
    for seq_id, length in ((0, 9 + 5), (1, 14 + 3)):
        assert call(CACHE + "get_sequence_length", engine.cache, seq_id) == length
    assert engine.total_length == 9 + 5 + 14 + 3
    with pytest.raises(Exception, match="not been committed|not committed"):
        call(STATE + "fork_sequence", engine.cache, 0, 9, -1)
    if whose == "ours":  # the other one has counted the rows when it finds out
        with pytest.raises(ValueError, match="token tree nodes that are not committed"):
            engine.begin([0], [1])
        with pytest.raises(ValueError, match="token tree nodes that are not committed"):
            call(STATE + "fork_sequence", engine.cache, 0, 9, 11)
        call(STATE + "fork_sequence", engine.cache, 0, 9, 9)  # in front of them it may
        call(STATE + "popn", engine.cache, 0, 2)  # of the nodes the last two
        assert engine.total_length == 9 + 3 + 14 + 3 + 9
        call(STATE + "remove_sequence", engine.cache, 9)
    for seq_id in (0, 1):
        call(STATE + "remove_sequence", engine.cache, seq_id)
    assert engine.total_length == 0
    assert engine.num_available_pages == available + 3 + 4
    if whose == "ours":
        engine.cache.check_integrity()


def test_plain_steps_on_uncommitted_nodes_are_refused_by_the_stock_cache_too():
    engine = make_engine("stock")
    engine.add(0)
    engine.begin([0], [2], [-1, 0])
    call(STATE + "end_forward", engine.cache)
    with pytest.raises(Exception, match="CommitAcceptedTokenTreeNodes"):
        engine.begin([0], [1])


# --- windows of sequences ------------------------------------------------------------------------


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
        cache = create_positional(config, kernels, "pagedkv", kinds=(0, 3), layer_window=9)
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


# --- positions ----------------------------------------------------------------------------------


def test_positions_for_compiled_code():
    """Functions that Relax compiles refuse tensors that do not begin at their data pointer."""
    module = tvm.IRModule({"double": _double()})
    vm = relax.VirtualMachine(tvm.compile(relax.transform.LegalizeOps()(module), "llvm"), tvm.cpu())
    cache = make_engine("ours").cache
    past = np.zeros(2, int)
    for seq_id in (0, 1):
        call(STATE + "add_sequence", cache, seq_id)
    for lengths in ([5, 3], [1, 1], [2, 9]):
        call(STATE + "begin_forward", cache, Shape([0, 1]), Shape(lengths))
        positions = call(CACHE + "get_query_positions", cache)
        expected = np.concatenate([p + np.arange(n) for p, n in zip(past, lengths, strict=True)])
        np.testing.assert_array_equal(positions.numpy(), expected)
        np.testing.assert_array_equal(vm["double"](positions).numpy(), 2 * expected)
        call(STATE + "end_forward", cache)
        past += lengths
    del cache  # the tensor keeps its memory
    np.testing.assert_array_equal(positions.numpy(), expected)


def test_kernels_of_others_get_tensors_without_an_offset():
    """Some compiled functions refuse one, and some libraries forget to add it."""
    seen = set()

    def record(name):
        def kernel(*args):
            for i, each in enumerate(args):
                if isinstance(each, tvm_ffi.Tensor):
                    assert view(each).ctypes.data == each.data_ptr(), (name, i)
                    assert each.data_ptr() % (64 if each.dtype == "int32" else 16) == 0, (name, i)
                    seen.add((name, i))
            return KERNELS[name](*args)

        return kernel

    engine = make_engine("ours", {name: record(name) for name in KERNELS})
    engine.add(0, 1, 2)
    engine.step([0, 1, 2], [5, 3, 9])
    engine.step([2, 0, 1], [1, 1, 1])
    engine.fork(0, 3)
    engine.step([3, 0], [1, 2])
    assert {name for name, _ in seen} >= {"decode", "prefill", "split_rotary", "transpose_append"}


# --- RNN states ---------------------------------------------------------------------------------


def test_rnn_states_are_left_alone():
    """Hybrid models call the same functions on their recurrent state; it is that of apache-tvm."""
    nothing = tvm_ffi.convert(lambda *_: None)
    initial = tvm.runtime.tensor(np.zeros((2, 3), "float32"))
    create = tvm_ffi.get_global_func("vm.builtin.rnn_state_create")
    state = create(1, 4, 2, [nothing], [nothing], [initial])
    engine = make_engine("ours")
    for each in (state, engine.cache):
        call(STATE + "add_sequence", each, 0)
        call(STATE + "begin_forward", each, Shape([0]), Shape([3]))
        call(STATE + "end_forward", each)
        call(STATE + "fork_sequence", each, 0, 1, -1)
        call(STATE + "begin_forward", each, Shape([0, 1]), Shape([1, 1]))
        call(STATE + "end_forward", each)
        call(STATE + "popn", each, 0, 1)
        call(STATE + "remove_sequence", each, 1)
        call(STATE + "clear", each)
    with pytest.raises(Exception, match="cannot be found"):
        call(STATE + "remove_sequence", state, 0)
    with pytest.raises(Exception, match="type|expected|Mismatched"):
        call(CACHE + "get_num_available_pages", state)


# --- disaggregated serving -----------------------------------------------------------------------


def _connect(sender, receiver, number: int) -> None:
    """Let rows that the sender's cache makes ready go to the receiver's pages, as by RDMA."""
    layers = range(NUM_LAYERS)
    sources = [view(_runtime.pages_of(sender.cache, layer)) for layer in layers]
    targets = [view(_runtime.pages_of(receiver.cache, layer)) for layer in layers]

    def put(block: int) -> None:
        for source, target, length in _runtime.send_block(sender.cache, block)["runs"][0]:
            for i in range(length):
                here, there = divmod(source + i, 4), divmod(target + i, 4)
                for layer in layers:
                    rows = sources[layer][here[0], :, :, here[1]]
                    targets[layer][there[0], :, :, there[1]] = rows
        _runtime.release_send_block(sender.cache, block)

    _runtime.set_send_handler(sender.cache, number, put, [65 * 4])


@pytest.mark.parametrize("group_offset", [0, 3])
def test_prefill_here_and_decode_there(group_offset):
    """The last argument of mark_send is the number of the destination group's first worker."""
    prefill, decode = make_engine("ours"), make_engine("ours")
    _connect(prefill, decode, group_offset)
    decode.add(0, 1)
    decode.step([0], [6])
    slots = call("vm.builtin.kv_cache_disagg_prepare_recv", decode.cache, 1, 23)
    prefill.add(5)
    mark = "vm.builtin.kv_cache_disagg_mark_send"
    with pytest.raises(ValueError, match=rf"no receiver 7 .*connected: {group_offset}\)"):
        call(mark, prefill.cache, 5, 0, slots, 7)
    call(mark, prefill.cache, 5, 0, slots, group_offset)
    prefill.step([5], [16])
    prefill.step([5], [7])
    decode.expected.sequences[1] = prefill.expected.sequences[5]
    prefill.remove(5)
    decode.check()
    decode.step([1, 0], [1, 1])
    decode.step([0, 1], [4, 9])


def test_only_what_the_receiver_lacks_is_sent():
    """It has the first 8 positions, of a prefix; the sender's rows from there on, old and new."""
    prefill, decode = make_engine("ours"), make_engine("ours")
    _connect(prefill, decode, 1)
    text = [prefill.rng.standard_normal((20, 8, DIM)).astype("float32") for _ in range(NUM_LAYERS)]
    for engine, length in ((prefill, 13), (decode, 8)):
        engine.add(0)
        engine.step([0], [length], rows=[each[:length] for each in text])
    slots = call("vm.builtin.kv_cache_disagg_prepare_recv", decode.cache, 0, 12)
    call("vm.builtin.kv_cache_disagg_mark_send", prefill.cache, 0, 8, slots, 1)
    prefill.step([0], [7], rows=[each[13:] for each in text])
    decode.expected.sequences[0] = prefill.expected.sequences[0]
    decode.step([0], [1])


# --- what is passed without a meaning ------------------------------------------------------------


@pytest.mark.parametrize("theta, scale", [(-1.0, 1.0), (0.0, 0.0), (float("nan"), float("inf"))])
def test_theta_and_scale_without_a_rotation(theta, scale):
    """Models without RoPE pass -1 for theta, for example."""
    config = engine_config(rope=pkv.RopeConfig(mode="none", theta=theta, scale=scale))
    assert config.rope == pkv.RopeConfig(mode="none")
    for mode in ("normal", "inline"):
        with pytest.raises(ValueError, match=r"rope\.(theta|scale)"):
            pkv.RopeConfig(mode=mode, theta=theta, scale=scale)


class _Rope:
    """What `create_positional` reads, unchecked."""

    def __init__(self, mode: str, theta: float, scale: float):
        self.mode, self.theta, self.scale = mode, theta, scale


@pytest.mark.parametrize("theta, scale", [(-1.0, 1.0), (0.0, 0.0), (float("nan"), float("inf"))])
def test_the_constructors_ignore_them_as_well(theta, scale):
    engine = make_engine("ours")
    named = tvm_ffi.get_global_func("pagedkv.create")
    config = engine_config()
    nothing = tvm_ffi.convert(lambda *_: None)
    names = (
        "transpose_append prefill_ragged prefill decode merge split_rotary copy_single_page "
        "debug_get_kv compact_copy"
    ).split()
    kernels = dict.fromkeys(names, nothing)
    layer = {"kind": "mha", "num_qo_heads": 4, "num_kv_heads": 2, "qk_head_dim": 8}
    fields = {
        "max_num_sequences": 4, "max_total_tokens": 64, "prefill_chunk_size": 32, "page_size": 4,
        "dtype": "float32", "layers": [{**layer, "rope_theta": theta, "rope_scale": scale}],
    }  # fmt: skip

    def positional(mode: str):
        object.__setattr__(config, "rope", _Rope(mode, theta, scale))
        return create_positional(config, kernels, "tirx")

    layouts = {call(CACHE + "get_layout_hash", c) for c in (positional("none"), engine.cache)}
    assert len(layouts) == 1
    cache = named({**fields, "rope_mode": 0}, kernels, tvm.cpu())
    assert cache.description["layers"][0]["rope_theta"] == 10000.0
    for mode, number in (("normal", 1), ("inline", 2)):
        with pytest.raises(ValueError, match="rope_theta and rope_scale must be positive"):
            positional(mode)
        with pytest.raises(ValueError, match="rope_theta and rope_scale must be positive"):
            named({**fields, "rope_mode": number}, kernels, tvm.cpu())


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
