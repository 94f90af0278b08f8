# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's plan and run functions in NumPy: they record what they are given, and compute.

The argument lists are those of FlashInfer's bindings as apache-tvm 0.27 calls them. A run finds the
plan that it was given, and checks that nothing changed since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi

from ... import reference
from .python_kernels import view

PREFILL_PLAN = (
    "float_workspace int_workspace pinned_workspace qo_indptr kv_indptr kv_lens num_rows "
    "batch_size num_qo_heads num_kv_heads page_size cuda_graph qk_head_dim v_head_dim causal "
    "window_left fixed_split_size disable_split_kv num_colocated_ctas"
).split()
DECODE_PLAN = (
    "float_workspace int_workspace pinned_workspace kv_indptr batch_size num_qo_heads "
    "num_kv_heads page_size cuda_graph window_left logits_soft_cap qk_head_dim v_head_dim "
    "empty_q empty_kv"
).split()
_TAIL = "layout window_left enable_pdl sm_scale rope_rcp_scale rope_rcp_theta"
RAGGED_RUN = (
    "float_workspace int_workspace plan_info q k v qo_indptr kv_indptr o lse mask_mode " + _TAIL
).split()
PAGED_RUN = (
    "float_workspace int_workspace plan_info q k_pages v_pages qo_indptr kv_indptr kv_indices "
    "last_page_len o lse mask_mode " + _TAIL
).split()
DECODE_RUN = (
    "float_workspace int_workspace plan_info q k_pages v_pages kv_indptr kv_indices "
    "last_page_len o lse " + _TAIL
).split()
_INPUTS = {"qo_indptr", "kv_indptr", "kv_lens", "last_page_len", "kv_indices"}


@dataclass
class Call:
    """A call: the name of the function, and its arguments by name, integer arrays as copies."""

    name: str
    arguments: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """Return the part that does not depend on addresses, page ids or values."""
        told = {}
        for name, value in self.arguments.items():
            if isinstance(value, np.ndarray):
                value = value.shape if name == "kv_indices" else value.tolist()
            elif isinstance(value, tvm_ffi.core.Tensor):
                shape = tuple(value.shape)[name.endswith("_pages") :]  # any number of pages
                value = shape, tuple(value.strides), str(value.dtype)
            elif name == "plan_info":
                value = len(value)
            else:
                value = type(value), value
            told[name] = value
        return told


class Recorder:
    """The three pairs of functions, and the calls that they got.

    Parameters
    ----------
    computes : bool
        Whether a run checks its plan, and computes.
    """

    def __init__(self, computes: bool = True):
        self.computes = computes
        self.calls: list[Call] = []
        self.plans: dict[int, Call] = {}

    def kernel(self, name: str) -> list:
        """``["flashinfer", run, plan]`` for the kernel `name`."""
        plan_names = DECODE_PLAN if name == "decode" else PREFILL_PLAN
        run_names, compute = {
            "prefill_ragged": (RAGGED_RUN, _ragged),
            "prefill": (PAGED_RUN, _paged),
            "decode": (DECODE_RUN, _decode),
        }[name]

        def plan(*values):
            call = self._record(f"{name} plan", plan_names, values)
            self.plans[len(self.plans)] = call
            return [len(self.plans) - 1, 7]

        def run(*values):
            call = self._record(f"{name} run", run_names, values)
            if not self.computes:
                return
            planned = self.plans[call.arguments["plan_info"][0]]
            assert planned.name == f"{name} plan"
            _check_plan(planned.arguments, call.arguments)
            compute(call.arguments)

        return ["flashinfer", tvm_ffi.convert(run), tvm_ffi.convert(plan)]

    def _record(self, name: str, names: list[str], values: tuple) -> Call:
        arguments = dict(zip(names, values, strict=True))
        for key in _INPUTS & set(arguments):
            arguments[key] = view(arguments[key]).copy()
        self.calls.append(Call(name, arguments))
        return self.calls[-1]

    def take(self) -> list[Call]:
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


def _check_plan(planned: dict, given: dict) -> None:
    for name in ("float_workspace", "int_workspace"):
        assert planned[name].data_ptr() == given[name].data_ptr()
    for name in ("qo_indptr", "kv_indptr"):
        if name in planned and name in given:
            np.testing.assert_array_equal(planned[name], given[name])
    assert planned["batch_size"] == len(planned["kv_indptr"]) - 1
    if "mask_mode" in given:
        assert planned["causal"] == (given["mask_mode"] == 1)
    num_rows, num_qo_heads, dim = given["q"].shape
    assert (planned["num_qo_heads"], planned["qk_head_dim"]) == (num_qo_heads, dim)
    assert planned.get("num_rows", num_rows) == num_rows


def _paged(given: dict) -> None:
    assert given["layout"] == 1  # [pages, heads, page_size, dim]
    pages = np.stack([view(given["k_pages"]), view(given["v_pages"])], axis=1)
    view(given["o"])[...], view(given["lse"])[...] = reference.paged_attention(
        view(given["q"]),
        given["qo_indptr"],
        pages,
        given["kv_indptr"],
        given["kv_indices"],
        given["last_page_len"],
        given["sm_scale"],
        causal=bool(given["mask_mode"]),
    )


def _decode(given: dict) -> None:
    qo_indptr = np.arange(len(given["kv_indptr"]), dtype=np.int32)
    _paged({**given, "qo_indptr": qo_indptr, "mask_mode": 0})


def _ragged(given: dict) -> None:
    assert given["layout"] == 0  # [rows, heads, dim]
    q, k, v = (view(given[name]) for name in "qkv")
    view(given["o"])[...], view(given["lse"])[...] = reference.ragged_attention(
        q, given["qo_indptr"], k, v, given["kv_indptr"], given["sm_scale"],
        causal=bool(given["mask_mode"]),
    )  # fmt: skip
