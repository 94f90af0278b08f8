# SPDX-License-Identifier: Apache-2.0
"""Kinds of arguments: a value that a function takes, and values that no function may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm_ffi import Shape

from ..cases.caches.checkpoint_cases import call, export
from ..emulators.python_kernels import KERNELS, LAYER, MLA_KERNELS, MLA_LAYER, make_cache
from ..emulators.python_tree_kernels import KERNELS_WITH_TREES, MLA_KERNELS_WITH_TREES

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
WIDE = 2**32  # becomes 0 where somebody keeps 32 bits
LENGTHS = {0: 6, 1: 4, 2: 6}  # sequence 2 is a fork of 0
STEP_IDS, STEP_LENGTHS = (0, 1), (3, 2)
ROWS = sum(STEP_LENGTHS)
MHA, SLIDING, MLA, LANE = 0, 1, 2, 3  # layers
UNKNOWN, IMPORTED = 77, 9


def make_world(phase: str) -> Any:
    """A small cache with layers of all kinds; for windows of sequences, with one.

    Parameters
    ----------
    phase : str
        "idle": outside a step; "step": within one; "tree": between two, with uncommitted nodes;
        "import": while sequence `IMPORTED` lacks the pages of a layer; "imported": with all pages
        of it, before `finish_import`; "windows": outside a step, where sequences may have windows
        and steps spans;
        "textless": outside a step, before any tokens are recorded;
        "lists": within a step, with layers that attend to lists and an index lane;
        "hint": outside a step, with hint 1;
        "receive": while sequence 2 receives; "send": while sequence 1 is sent to receiver 0.
    """
    if phase == "windows":
        return _window_world()
    if phase == "textless":
        return make_cache()
    if phase == "lists":
        return _lists_world()
    cache = make_cache(
        [KERNELS_WITH_TREES, MLA_KERNELS_WITH_TREES],
        layers=[
            LAYER,
            {**LAYER, "kind": "mha_sliding", "window": 8},
            {**MLA_LAYER, "kernel_set": 1},
        ],
        max_num_sequences=6,
    )
    for seq_id, length in LENGTHS.items():
        if seq_id == 2:
            cache.fork_sequence(0, 2)
            continue
        cache.add_sequence(seq_id)
        with cache.forward([seq_id], [length]):
            for layer in (MHA, SLIDING):
                cache.attention(layer, np.full((length, 8, 8), 0.5, "float32"))
            cache.append_mla_kv(MLA, np.full((length, 24), 0.5, "float32"))
        cache.record_tokens(seq_id, range(length))
    if phase == "step":
        cache.begin_forward(STEP_IDS, STEP_LENGTHS)
        cache.attention(MHA, np.full((ROWS, 8, 8), 0.5, "float32"))  # a source for shared K and V
    if phase == "tree":
        cache.begin_forward(STEP_IDS, STEP_LENGTHS, [-1, 0, 0, -1, 0])
        cache.end_forward()
    if phase == "receive":
        tvm_ffi.get_global_func("vm.builtin.kv_cache_disagg_prepare_recv")(cache, 2, 3)
    if phase == "hint":
        tvm_ffi.get_global_func("pagedkv.prefix_retain")(cache, Shape([0] * 8), b"", 50, 1e3)
    if phase == "send":
        handler, num_slots = tvm_ffi.convert(lambda block: None), Shape([64] * 3)
        tvm_ffi.get_global_func("pagedkv.set_send_handler")(cache, 0, handler, num_slots)
        slots = Shape([1, 0, 6] * 3)  # two more than there are rows
        tvm_ffi.get_global_func("vm.builtin.kv_cache_disagg_mark_send")(cache, 1, 0, slots, 0)
    if phase in ("import", "imported"):
        metadata, groups = export(cache, 0)
        call("prepare_import", cache, IMPORTED, metadata)
        for layer, pages in enumerate(groups):
            if layer != MHA or phase == "imported":
                call("import_page_group", cache, IMPORTED, layer, pages)
    return cache


def _window_world() -> Any:
    cache = make_cache({"prefill_spans": KERNELS["prefill"]}, sliding_window=True)
    for seq_id, length in LENGTHS.items():
        cache.add_sequence(seq_id)
        with cache.forward([seq_id], [length]):
            for layer in range(2):
                cache.attention(layer, np.full((length, 8, 8), 0.5, "float32"))
    return cache


def _lists_world() -> Any:
    """Layers MHA and MLA attend to lists, layer LANE chooses them; their rows are appended."""
    attend, choose = (
        {name: lambda *_: None for name in names}
        for names in (
            ("attend_listed", "attend_blocks", "page_bounds", "choose_pages"),
            ("index_top_k", "index_top_blocks"),
        )
    )
    cache = make_cache(
        [KERNELS | attend, MLA_KERNELS | attend, MLA_KERNELS | choose],
        layers=[
            LAYER,
            LAYER,
            {**MLA_LAYER, "kernel_set": 1},
            {"kind": "mla", "num_qo_heads": 3, "qk_head_dim": 8, "kernel_set": 2},
        ],
    )
    for ids, lengths in (((0,), (6,)), ((1,), (4,)), (STEP_IDS, STEP_LENGTHS)):
        if ids != STEP_IDS:
            cache.add_sequence(*ids)
        cache.begin_forward(ids, lengths)
        for layer in (MHA, SLIDING):
            cache.attention(layer, np.full((sum(lengths), 8, 8), 0.5, "float32"))
        cache.append_mla_kv(MLA, np.full((sum(lengths), 24), 0.5, "float32"))
        cache.append_mla_kv(LANE, np.full((sum(lengths), 8), 0.5, "float32"))
        if ids != STEP_IDS:
            cache.end_forward()
    return cache


@dataclass(frozen=True)
class Kind:
    """`valid()` makes a value that the function takes, `wrong` has those that it must refuse."""

    valid: Callable[[], Any]
    wrong: dict[str, Callable[[], Any]]
    takes_none: bool = False


def _constants(**values: Any) -> dict[str, Callable[[], Any]]:
    return {name: lambda value=value: value for name, value in values.items()}


def integer(valid: int, *wrong: int) -> Kind:
    """An int; `valid` plus 2**32 is wrong as are both ends of int64."""
    numbers = {*wrong, INT64_MIN, INT64_MIN + 1, INT64_MAX, INT64_MAX - 1, WIDE + valid}
    return Kind(lambda: valid, {str(n): (lambda n=n: n) for n in sorted(numbers)})


def shape(valid: tuple[int, ...], **wrong: tuple[int, ...]) -> Kind:
    """A Shape."""
    both = {name: (lambda x=numbers: Shape(x)) for name, numbers in wrong.items()}
    return Kind(lambda: Shape(valid), both)


def tensor(
    *dims: int,
    dtype: str = "float32",
    free_axis: int | None = None,
    any_host: bool = False,
    is_read: bool = False,
) -> Kind:
    """A contiguous tensor on the CPU.

    Other sizes of `free_axis` are right as well, with `any_host` other numbers of the device, and
    any strides of what `is_read` only.
    """

    def full(*shape: int, dtype: str = dtype, device=None):
        return tvm.runtime.tensor(np.zeros(shape, dtype), device or tvm.cpu())

    wrong: dict[str, Callable[[], Any]] = {
        "no_dimensions": lambda: full(),
        "one_dimension": lambda: full(int(np.prod(dims))),
        "one_more_dimension": lambda: full(*dims, 1),
        "one_less_dimension": lambda: full(*dims[:-1]),
        "empty": lambda: full(0, *dims[1:]),
        "all_empty": lambda: full(*[0] * len(dims)),
        "reversed": lambda: full(*[n + i for i, n in enumerate(reversed(dims))]),
        "device_1": lambda: full(*dims, device=tvm.cpu(1)),
        # The right shape over fewer bytes, rows that overlap, and rows with gaps.
        "strides_of_0": lambda: _strided(dims, [0] * len(dims), dtype),
        "transposed": lambda: _transposed(dims, dtype),
        "gaps": lambda: _strided(dims, [2 * s for s in _compact(dims)], dtype),
    }
    for axis in set(range(len(dims))) - {free_axis}:
        for step in (-1, 1):
            changed = [n + step * (i == axis) for i, n in enumerate(dims)]
            wrong[f"axis_{axis}_{step:+d}"] = lambda changed=changed: full(*changed)
    for other in {"float16", "float64", "int32", "uint8", "bool"} - {dtype}:
        wrong[other] = lambda other=other: full(*dims, dtype=other)
    if len(dims) == 1:
        for same in ("one_dimension", "reversed", "transposed"):
            del wrong[same]
    if any_host:
        del wrong["device_1"]
    if is_read:
        for same in ("strides_of_0", "transposed", "gaps"):
            wrong.pop(same, None)
    return Kind(lambda: full(*dims), wrong)


def _compact(dims: tuple[int, ...]) -> list[int]:
    return [int(np.prod(dims[i + 1 :])) for i in range(len(dims))]


def _strided(dims: tuple[int, ...], strides: list[int], dtype: str):
    """A view with these strides in elements, on memory of its own."""
    import torch

    extent = 1 + sum((n - 1) * stride for n, stride in zip(dims, strides, strict=True))
    base = torch.zeros(extent, dtype=getattr(torch, dtype))
    return tvm_ffi.from_dlpack(torch.as_strided(base, dims, strides))


def _transposed(dims: tuple[int, ...], dtype: str):
    strides = list(reversed(_compact(tuple(reversed(dims)))))
    return _strided(dims, strides, dtype)


def _other_types() -> dict[str, Callable[[], Any]]:
    return {
        "none": lambda: None,
        "text": lambda: "0",
        "bytes": lambda: b"0",
        "half": lambda: 0.5,
        "infinity": lambda: float("inf"),
        "array": lambda: [0],
        "array_of_none": lambda: [None],
        "map": lambda: {"a": 1},
        "function": lambda: tvm.get_global_func("vm.builtin.shape_of"),
        "device": lambda: tvm.cpu(),
        "cache": lambda: make_cache(),
        "stock_cache": stock_cache,
    }


def wrong_types(kind: Kind) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Values of other types than the argument's; what tvm_ffi converts is none of them."""
    valid = kind.valid()
    for name, make in _other_types().items():
        if name == "none" and kind.takes_none:
            continue
        # ints are floats, arrays of ints are shapes
        if isinstance(valid, float) and name in ("half", "infinity"):
            continue
        if isinstance(valid, Shape) and name == "array":
            continue
        if isinstance(valid, tvm_ffi.Function) and name == "function":
            continue
        if isinstance(valid, bytes) and name == "bytes":
            continue
        yield name, make
    if not isinstance(valid, (int, float)):
        yield "int", lambda: 3
    if not isinstance(valid, Shape):
        yield "shape", lambda: Shape([0])
    if not hasattr(valid, "shape"):
        yield "tensor", lambda: tvm.runtime.tensor(np.zeros(3, "float32"))


_STOCK: list[Any] = []


def stock_cache() -> Any:
    """A cache of apache-tvm."""
    if not _STOCK:
        import tvm_pagedkv as pkv

        from ..emulators.stock import create_positional

        config = pkv.KVCacheConfig(
            num_layers=1, num_qo_heads=4, num_kv_heads=2, qk_head_dim=8, max_num_sequences=2,
            max_total_tokens=64, prefill_chunk_size=16, rope=pkv.RopeConfig(mode="none"),
        )  # fmt: skip
        pkv.use_stock_runtime()
        try:
            kernels = {**KERNELS, "debug_get_kv": print, "compact_copy": print}
            _STOCK.append(create_positional(config, kernels, "tirx"))
        finally:
            pkv.use_pagedkv_runtime()
    return _STOCK[0]


SEQ = integer(0, UNKNOWN, -1, 2**31, 2**31 - 1)
NEW_SEQ = Kind(lambda: 9, _constants(**{str(seq_id): seq_id for seq_id in LENGTHS}))  # any other
SCALE = Kind(lambda: 0.25, _constants(nan=float("nan"), inf=float("inf"), minus_inf=float("-inf")))
IDS = shape(
    STEP_IDS, unknown=(0, UNKNOWN), twice=(0, 0), none=(), one=(0,), three=(0, 1, 2),
    wide=(WIDE, WIDE + 1), low=(INT64_MIN, 0), high=(0, INT64_MAX),
    many=tuple(range(10_000)), repeated=(0,) * 10_000,
)  # fmt: skip
APPENDS = shape(
    STEP_LENGTHS, zero=(3, 0), negative=(3, -2), low=(INT64_MIN, 1), high=(1, INT64_MAX),
    overflow=(INT64_MAX, INT64_MAX), to_zero=(2**62, 2**62), wide=(WIDE + 3, 2), int32=(2**31, 1),
    none=(), one=(5,), three=(1, 1, 1), chunk=(32, 1), many=(1,) * 10_000,
)  # fmt: skip
SPANS = shape(
    (0, 6, 9), few=(0, 6), before=(0, 5, 8), behind=(0, 6, 10), empty=(0, 6, 6), turned=(0, 8, 7),
    unknown=(UNKNOWN, 6, 9), other=(2, 6, 8), overlap=(0, 6, 8, 0, 7, 9), low=(0, INT64_MIN, 9),
    high=(0, 6, INT64_MAX), wide=(WIDE, 6, 9), wide_begin=(0, WIDE + 6, WIDE + 9),
)  # fmt: skip
TREE = Kind(
    lambda: None,
    {
        name: (lambda x=parents: Shape(x))
        for name, parents in {
            "short": (-1,),
            "long": (-1, 0, 1, -1, 0, 1),
            "empty": (),
            "later": (-1, 2, 1, -1, 0),
            "itself": (0, 0, 1, -1, 0),
            "low": (-1, INT64_MIN, 1, -1, 0),
            "high": (-1, INT64_MAX, 1, -1, 0),
            "wide": (-1, WIDE, 1, -1, 0),
            "other_tree": (-1, 0, 1, 2, 0),
        }.items()
    },
    takes_none=True,
)
LEAVES = shape(
    (0, -1), none=(), one=(0,), three=(0, 0, 0), low=(INT64_MIN, 0), high=(INT64_MAX, 0),
    far=(3, 0), before=(-2, 0), wide=(WIDE, 0),
)  # fmt: skip
QKV, Q, K, LATENT, LSE = (
    tensor(ROWS, *shape, is_read=True) for shape in ((8, 8), (4, 8), (2, 8), (24,), (4,))
)
OUT, OUT_LSE = tensor(ROWS, 4, 8), tensor(ROWS, 4)
SINKS = tensor(4, is_read=True)
NO_SINKS = Kind(lambda: None, SINKS.wrong, takes_none=True)
