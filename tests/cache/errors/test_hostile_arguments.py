# SPDX-License-Identifier: Apache-2.0
"""Every global function with every wrong argument: an error of the right kind that changes nothing.

A function that is registered must have a line in `FUNCTIONS`. Its arguments after the cache are
given as kinds (hostile_values.py), each with a value that the function takes and with values that
it must refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv
from tvm_pagedkv.relax.own_creation import CREATE_IN_MODEL
from tvm_pagedkv.relax.stock_creation import CREATE_POSITIONALLY

from ...support.cases.caches.checkpoint_cases import export
from ...support.emulators.python_kernels import make_cache, snapshot
from ...support.harness.in_child import failures
from ...support.worlds.hostile_lists import LIST_FUNCTIONS
from ...support.worlds.hostile_transfers import (
    BLOCK,
    HANDLER,
    NEW_RECEIVER,
    POOL_SLOTS,
    RECEIVE,
    RECEIVING_SEQ,
    SEND,
    SLOT_MAP,
)
from ...support.worlds.hostile_values import (
    APPENDS,
    IDS,
    IMPORTED,
    LATENT,
    LEAVES,
    LSE,
    MHA,
    MLA,
    NEW_SEQ,
    NO_SINKS,
    OUT,
    OUT_LSE,
    QKV,
    SCALE,
    SEQ,
    SINKS,
    SLIDING,
    SPANS,
    TREE,
    UNKNOWN,
    WIDE,
    K,
    Kind,
    Q,
    integer,
    make_world,
    shape,
    tensor,
    wrong_types,
)

STATE, CACHE, OWN = "vm.builtin.kv_state_", "vm.builtin.attention_kv_cache_", "pagedkv."
RNN = "vm.builtin.rnn_state_"
DISAGG = "vm.builtin.kv_cache_disagg_"
ERRORS = (ValueError, KeyError, IndexError, TypeError, pkv.CacheFullError)

# Functions of an older cache of apache-tvm that is no kv state, and those without arguments.
OTHERS = {
    *(f"{CACHE}{name}" for name in ("append", "array_clear", "array_popn", "create", "update")),
    *(f"{CACHE}{name}" for name in ("view", "window_override", "window_override_with_sinks")),
    OWN + "use_stock_runtime", OWN + "use_pagedkv_runtime", OWN + "library",
}  # fmt: skip
# Their arguments have no cache, or one with recurrent layers: test_recurrent_cache.py,
# test_state_types.py, transfer/test_first_positions.py, test_hostile_creation.py,
# test_transfer_messages.py, test_hostile_bundles.py, test_prefix_stores.py, test_cuda_scratch.py,
# stores/test_checksum.py, test_other_machines.py, test_rnn_state.py, kernels/test_threads.py.
WITHOUT_CACHE = {
    CREATE_IN_MODEL, CREATE_POSITIONALLY, OWN + "create", OWN + "copy_regions", OWN + "checksum",
    OWN + "load_bundle", OWN + "choose_bundle_target", OWN + "cpu_features", OWN + "require_cpu",
    *(f"{OWN}tier_{name}" for name in ("next_job", "finish_job", "wait", "flush")),
    OWN + "conv", OWN + "recurrent", OWN + "check_conv", OWN + "check_recurrent",
    OWN + "state_table", OWN + "pool_of", OWN + "first_to_send", OWN + "shorten_receive",
    OWN + "tier_close", OWN + "tier_memory", OWN + "borrow_scratch", OWN + "return_scratch",
    *(f"{RNN}{name}" for name in ("create", "get", "set", "debug_get")),
    OWN + "rnn_state_can_fork", OWN + "rnn_state_can_popn", OWN + "set_num_threads",
}  # fmt: skip

LAYER = integer(MHA, MLA, -1, 3, -(2**31), 2**31)
MLA_LAYER = integer(MLA, MHA, SLIDING, -1, 3)
GROUP = integer(0, -1, 3, 2**31)
BEGIN, END = integer(1, -1, 5, 7), integer(4, -1, 0, 7)
ROWS_OF_TWO = tensor(2, 3, 2, 8)  # of the layers that are not MLA, in [BEGIN, END)
NEW_ROWS_OF_TWO = tensor(2, 3, 2, 8, is_read=True)
LATENT_ROWS = tensor(1, 3, 24)
NEW_LATENT_ROWS = tensor(1, 3, 24, free_axis=1, any_host=True, is_read=True)
PAGES_OF_MHA = tensor(1, 2, 2, 2, 4, 8, any_host=True)  # both pages of sequence 0
SOME_PAGES_OF_MHA = tensor(1, 2, 2, 2, 4, 8, free_axis=1, any_host=True)
ROWS_OF_PAGES = tensor(8, 2, 8, is_read=True)  # of both pages of sequence 0
WITH_HISTORY = Kind(lambda: True, {})
PAGES = shape((0, 1), outside=(0, 16), negative=(-1, 0), wide=(WIDE, 1), one=(0,), none=())
SLOTS = shape((4, 2), many=(4, 5), negative=(4, -1), wide=(WIDE + 4, 2), one=(4,), none=())
NEW_SEQS = shape((IMPORTED,), taken=(0,), none=(), two=(IMPORTED, IMPORTED + 1))
IMPORTED_SEQ = integer(IMPORTED, 0, UNKNOWN, -1)
TOKENS = shape((0, 1, 9), negative=(0, -1), wide=(WIDE, 1))
NO_TOKENS = shape((), many=(1,), negative=(-1,), wide=(WIDE,))  # all those of sequence 0 are known
STEP_TOKENS = shape(
    (1, 2, 3, 4, 5), few=(1, 2, 3, 4), many=(1,) * 6, none=(), negative=(1, 2, 3, 4, -5),
    wide=(1, WIDE, 3, 4, 5),
)  # fmt: skip
SALT = Kind(lambda: b"salt", {})
SECONDS = Kind(lambda: 0.5, {"negative": lambda: -1.0, "nan": lambda: float("nan")})
TTL = Kind(lambda: 0.5, {**SECONDS.wrong, "zero": lambda: 0.0})
TIER = Kind(
    lambda: "", {"unknown": lambda: "disk", "none": lambda: "host", "store": lambda: "store"}
)
TIERS = {
    "host_bytes": 1 << 20, "model_id": "", "write_policy": "back", "min_hits": 1,
    "lookup_timeout": 0.0, "has_store": False,
}  # fmt: skip
TIER_OPTIONS = Kind(
    lambda: TIERS,
    {
        "empty": dict,
        "unknown": lambda: {**TIERS, "size": 1},
        "none": lambda: {**TIERS, "host_bytes": 0},
        "negative": lambda: {**TIERS, "host_bytes": -1},
        "small": lambda: {**TIERS, "host_bytes": 100},
        "float": lambda: {**TIERS, "host_bytes": 1.5},
        "write_policy": lambda: {**TIERS, "write_policy": "around"},
        "hits": lambda: {**TIERS, "min_hits": 0},
        "lookup_timeout": lambda: {**TIERS, "lookup_timeout": float("nan")},
        "unnamed": lambda: {**TIERS, "has_store": True},
    },
)
BAD_METADATA = {
    "empty": lambda: "",
    "an_object": lambda: "{}",
    "half": lambda: metadata()[: len(metadata()) // 2],
    "other_layout": lambda: metadata().replace('layout_hash":"', 'layout_hash":"0'),
    "overflow": lambda: metadata().replace('"seq_length":6', f'"seq_length":{2**63 - 1}'),
    "huge": lambda: "9" * 9999,
}
METADATA = Kind(lambda: metadata(), BAD_METADATA)


def metadata() -> str:
    """The metadata of a checkpoint of sequence 0."""
    return export(make_world("idle"), 0)[0]


def array_of(value: Any, bad: dict[str, Callable[[], Any]]) -> Kind:
    """An array with one value; arrays with bad ones or of another length are wrong."""
    wrong = {name: (lambda make=make: [make()]) for name, make in bad.items()}
    return Kind(lambda: [value()], {**wrong, "none": list, "two": lambda: [value(), value()]})


def page_numbers(*numbers: int) -> list[Shape]:
    """The numbers for each layer group."""
    return [Shape(numbers)] * 3


PAGE_NUMBERS = array_of(
    lambda: page_numbers(0, 1),
    {
        "gap": lambda: page_numbers(0, 2),
        "negative": lambda: page_numbers(-1, 0),
        "high": lambda: page_numbers(0, 2**63 - 1),
        "wide": lambda: page_numbers(0, 2**32 + 1),
        "three": lambda: page_numbers(0, 1, 2),
        "twice": lambda: page_numbers(0, 0),
        "one_group": lambda: page_numbers(0, 1)[:1],
    },
)

# name: (when it may be called, kinds of its arguments after the cache)
FUNCTIONS: dict[str, tuple[str, list[Kind]]] = {
    STATE + "clear": ("idle", []),
    STATE + "add_sequence": ("idle", [NEW_SEQ]),
    STATE + "remove_sequence": ("idle", [SEQ]),
    STATE + "fork_sequence": ("idle", [SEQ, NEW_SEQ, integer(3, -2, 7, 2**31)]),
    STATE + "popn": ("idle", [SEQ, integer(2, -1, 7, 2**31)]),
    OWN + "check_pop": ("idle", [SEQ, integer(2, -1, 7, 2**31)]),
    STATE + "begin_forward": ("idle", [IDS, APPENDS, TREE]),
    STATE + "end_forward": ("step", []),
    OWN + "begin_forward_with_spans": ("windows", [IDS, APPENDS, SPANS]),
    OWN + "abort_forward": ("step", []),
    OWN + "missing_layers": ("step", []),
    CACHE + "enable_sliding_window_for_seq": (
        "windows", [SEQ, integer(8, 0, -1), integer(2, -1, 8)],
    ),
    CACHE + "commit_accepted_token_tree_nodes": ("tree", [IDS, LEAVES]),
    CACHE + "empty": ("any", []),
    CACHE + "get_num_available_pages": ("any", []),
    CACHE + "get_total_sequence_length": ("any", []),
    CACHE + "get_sequence_length": ("any", [SEQ]),
    CACHE + "get_query_positions": ("step", []),
    CACHE + "attention_with_fused_qkv": ("step", [LAYER, SCALE, QKV, OUT, NO_SINKS]),
    CACHE + "attention_with_shared_kv": ("step", [LAYER, SCALE, Q, K, K, OUT, NO_SINKS]),
    CACHE + "self_attention": ("step", [LAYER, SCALE, Q, K, K, OUT, OUT_LSE, NO_SINKS]),
    CACHE + "cross_attention": ("step", [LAYER, SCALE, Q, OUT, OUT_LSE, NO_SINKS]),
    CACHE + "append_mla_kv": ("step", [MLA_LAYER, LATENT]),
    CACHE + "merge_attn_output_inplace": ("any", [OUT, OUT_LSE, Q, LSE]),
    CACHE + "debug_get_kv": ("any", [SEQ, BEGIN, END, ROWS_OF_TWO, ROWS_OF_TWO]),
    CACHE + "debug_get_kv_mla": ("any", [SEQ, BEGIN, END, LATENT_ROWS]),
    CACHE + "get_checkpoint_metadata": ("idle", [SEQ]),
    CACHE + "get_layout_hash": ("any", []),
    CACHE + "export_page_group": ("idle", [SEQ, GROUP, PAGES_OF_MHA]),
    CACHE + "prepare_import": ("idle", [NEW_SEQ, METADATA]),
    CACHE + "import_page_group": ("import", [IMPORTED_SEQ, GROUP, PAGES_OF_MHA]),
    CACHE + "finish_import": ("imported", [IMPORTED_SEQ]),
    DISAGG + "prepare_recv": ("idle", [SEQ, integer(2, 0, -1, 2**31)]),
    DISAGG + "mark_send": ("send", [SEQ, integer(0, -1, 2**31), SLOT_MAP, integer(0, -1, 1)]),
    OWN + "prefix_match": ("any", [TOKENS, SALT]),
    OWN + "prefix_add": ("idle", [NEW_SEQ, TOKENS, SALT]),
    OWN + "prefix_add_within": ("idle", [NEW_SEQ, TOKENS, SALT, SECONDS]),
    OWN + "prefix_prefetch": ("any", [TOKENS, SALT]),
    OWN + "prefix_locate": ("idle", [TOKENS, SALT, SECONDS]),
    OWN + "prefix_tier": ("any", []),
    OWN + "prefix_clear": ("idle", []),
    OWN + "prefix_flush": ("any", [Kind(lambda: 0.5, {})]),
    OWN + "prefix_open": ("textless", [TIER_OPTIONS]),
    OWN + "prefix_retain": ("idle", [TOKENS, SALT, integer(50, 0, -1, 101, 2**40), TTL]),
    OWN + "prefix_pin": ("idle", [TOKENS, SALT, TTL]),
    OWN + "prefix_release": ("hint", [integer(1, 0, -1, 2, 2**40)]),
    OWN + "prefix_demote": ("idle", [TOKENS, SALT, TIER]),
    OWN + "prefix_load": ("idle", [TOKENS, SALT]),
    OWN + "prefix_advance_clock": ("idle", [SECONDS]),
    OWN + "prefix_record": ("any", [SEQ, integer(6, 0, 5, 7, -1), NO_TOKENS]),
    OWN + "prefix_record_step": ("step", [STEP_TOKENS]),
    OWN + "prefix_length": ("any", [SEQ]),
    OWN + "is_in_forward": ("any", []),
    OWN + "total_length": ("any", []),
    OWN + "stats": ("any", []),
    OWN + "describe": ("any", []),
    OWN + "check_layer": ("any", [integer(MHA, -1, 3, -(2**31), 2**31)]),
    OWN + "sequence_ids": ("any", []),
    OWN + "page_table": ("any", [SEQ, GROUP]),
    OWN + "cached_pages": ("any", [GROUP]),
    OWN + "first_position": ("any", [SEQ, GROUP]),
    OWN + "sequence_window": ("any", [SEQ]),
    OWN + "check_integrity": ("any", []),
    OWN + "debug_set_kv": (
        "idle", [SEQ, integer(1, -1, 4, 7), NEW_ROWS_OF_TWO, NEW_ROWS_OF_TWO],
    ),
    OWN + "debug_set_kv_mla": ("idle", [SEQ, integer(1, -1, 4, 7), NEW_LATENT_ROWS]),
    OWN + "attention_with_sinks": ("step", [LAYER, SCALE, QKV, SINKS, OUT]),
    OWN + "attention_with_shared_kv_and_sinks": ("step", [LAYER, SCALE, Q, K, K, SINKS, OUT]),
    **{OWN + name: line for name, line in LIST_FUNCTIONS.items()},
    OWN + "checkpoint_metadata": ("idle", [SEQ, WITH_HISTORY]),
    OWN + "checkpoint_pages": ("idle", [SEQ, GROUP, WITH_HISTORY]),
    OWN + "export_pages": ("idle", [GROUP, PAGES, SLOTS, PAGES_OF_MHA]),
    OWN + "prepare_imports": ("idle", [NEW_SEQS, array_of(metadata, BAD_METADATA), PAGE_NUMBERS]),
    OWN + "import_pages": ("import", [IMPORTED_SEQ, GROUP, SOME_PAGES_OF_MHA]),
    OWN + "import_rows": ("import", [IMPORTED_SEQ, GROUP, ROWS_OF_PAGES, ROWS_OF_PAGES]),
    OWN + "share_every_prefix": ("idle", []),
    OWN + "receive_id": ("any", [SEQ]),
    OWN + "finish_receive": ("receive", [RECEIVING_SEQ, RECEIVE]),
    OWN + "cancel_receive": ("receive", [RECEIVING_SEQ, RECEIVE]),
    OWN + "release_receive": ("any", [Kind(lambda: 7, {})]),
    OWN + "set_send_handler": ("any", [NEW_RECEIVER, HANDLER, POOL_SLOTS]),
    OWN + "drop_send_handler": ("any", [Kind(lambda: 7, {})]),
    OWN + "send_id": ("any", [SEQ]),
    OWN + "cancel_send": ("any", [SEQ, SEND]),
    OWN + "send_block": ("send", [BLOCK]),
    OWN + "release_send_block": ("send", [BLOCK]),
    OWN + "pages_of": ("any", [integer(MHA, -1, 3, 2**31)]),
    OWN + "shared_pages": ("any", []),
    OWN + "poison_free_pages": ("any", []),
    OWN + "shuffle_free_pages": ("idle", [Kind(lambda: 7, {})]),
}  # fmt: skip


def registered() -> set[str]:
    prefixes = (STATE, CACHE, RNN, DISAGG, OWN, CREATE_POSITIONALLY)
    names = tvm_ffi.registry.list_global_func_names()
    return {name for name in names if name.startswith(prefixes)}


def test_every_function_has_a_line():
    assert registered() == {*FUNCTIONS, *OTHERS, *WITHOUT_CACHE}


# --- functions of a cache -------------------------------------------------------------------------


class Sweep:
    """Wrong calls of one function; the cache is made anew after calls that may have changed it."""

    def __init__(self, name: str, phase: str, kinds: list[Kind]):
        self.name, self.phase, self.kinds = name, phase, kinds
        self.function = tvm_ffi.get_global_func(name)
        self.renew()

    def renew(self) -> None:
        self.cache = make_world("idle" if self.phase == "any" else self.phase)
        self.before = self.state()

    def state(self) -> dict:
        return snapshot(self.cache, self.cache.sequence_ids())

    def valid(self) -> list[Any]:
        return [kind.valid() for kind in self.kinds]

    def refuses(self, *args: Any) -> None:
        """The call fails with an error of a user's mistake, and changes nothing."""
        try:
            result = self.function(*args)
        except ERRORS:
            pass
        except BaseException:
            self.renew()
            raise
        else:
            self.renew()
            raise AssertionError(f"was taken, and gave {result!r}")
        self.cache.check_integrity()
        if self.state() != self.before:
            self.renew()
            raise AssertionError("failed, but has changed the cache")

    def cases(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield from self.wrong_counts()
        yield from self.wrong_caches()
        for index, kind in enumerate(self.kinds):
            for name, make in (*kind.wrong.items(), *wrong_types(kind)):
                yield f"argument {index + 1}: {name}", lambda i=index, m=make: self.replace({i: m})
        for one, other in zip(self.wrong_values(), self.wrong_values(7), strict=True):
            both = {index: make for index, _, make in (one, other)}
            names = ", ".join(f"argument {i + 1}: {name}" for i, name, _ in (one, other))
            yield names, lambda both=both: self.replace(both)

    def wrong_values(self, shift: int = 0) -> list[tuple[int, str, Callable]]:
        """All values that kinds tell to be wrong, from another one on."""
        values = [
            (i, name, make)
            for i, kind in enumerate(self.kinds)
            for name, make in kind.wrong.items()
        ]
        return values[shift:] + values[:shift]

    def wrong_counts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        optional = sum(kind.takes_none for kind in self.kinds)
        for count in range(len(self.kinds) - optional):
            yield f"{count} arguments", lambda n=count: self.refuses(self.cache, *self.valid()[:n])
        for name, extra in (("none", None), ("int", 0), ("cache", self.cache)):
            yield f"one more: {name}", lambda x=extra: self.refuses(self.cache, *self.valid(), x)
        yield "nothing at all", lambda: self.refuses()

    def wrong_caches(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for name, make in wrong_types(Kind(make_cache, {})):
            if name == "cache" or (name == "stock_cache" and not self.name.startswith(OWN)):
                continue
            yield f"cache: {name}", lambda m=make: self.refuses(m(), *self.valid())

    def replace(self, changes: dict[int, Callable[[], Any]]) -> None:
        args = self.valid()
        for index, make in changes.items():
            args[index] = make()
        self.refuses(self.cache, *args)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_arguments(name):
    phase, kinds = FUNCTIONS[name]

    def cases():
        yield from Sweep(name, phase, kinds).cases()

    failed = failures(cases())
    assert not failed, f"{len(failed)} cases\n" + "\n".join(failed[:20])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_valid_arguments_in_and_out_of_phase(name):
    """The valid call works, so that what the sweep changes is what makes the calls fail."""
    phase, kinds = FUNCTIONS[name]
    function = tvm_ffi.get_global_func(name)
    for now in sorted({"idle", "step", phase} - {"any"}):
        cache = make_world(now)
        before = snapshot(cache, cache.sequence_ids())
        try:
            function(cache, *(kind.valid() for kind in kinds))
        except (LookupError, ValueError):
            assert phase not in (now, "any")
            assert snapshot(cache, cache.sequence_ids()) == before
        else:
            assert phase in (now, "any")
        cache.check_integrity()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
