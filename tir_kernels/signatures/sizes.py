# SPDX-License-Identifier: Apache-2.0
"""The sizes in the shapes of arguments: those of a spec, and those that a call decides."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ..conv_spec import ConvSpec
from ..recurrent_spec import RecurrentSpec
from ..script import name_value
from ..spec import KernelSpec

# Letters of sizes that a call decides, and what errors call them. Others are named as they are.
VARIABLES = {
    "T": "num_rows",  # of a step
    "B": "batch_size",  # sequences, or shared segments
    "B + 1": "num_starts",  # CSR offsets
    "S": "num_columns",  # rows of ragged K and V
    "P": "num_pages",  # of the pool
    "N": "num_page_ids",
    "M": "num_nodes",  # of trees
    "R": "num_row_ids",  # rows of shared segments
    "L": "num_lengths",
    "C": "num_lists",  # of blocks, of a row
    "W": "list_width",
}


def sizes_of(spec: KernelSpec | RecurrentSpec | ConvSpec) -> dict[str, Any]:
    """Return the sizes that a spec decides; a name may stand for several."""
    if isinstance(spec, RecurrentSpec):
        gates = spec.sections["log_decay"].shape
        return {
            "H": spec.num_heads,
            "Hk": spec.num_key_heads,
            "Dk": spec.key_dim,
            "Dv": spec.value_dim,
            "gates": gates,
        }
    if isinstance(spec, ConvSpec):
        return {"channels": spec.channels, "width": spec.width, "width - 1": spec.width - 1}
    num_heads, num_kv_heads = spec.num_qo_heads, spec.num_kv_heads
    fused = (num_heads + 2 * num_kv_heads, spec.qk_head_dim)
    if spec.has_two_widths:
        of_k = (num_heads + num_kv_heads) * spec.qk_head_dim
        fused = (of_k + num_kv_heads * spec.v_head_dim,)
    return {
        "Hq": num_heads,
        "Hk": num_kv_heads,
        "Dqk": spec.qk_head_dim,
        "2 Dqk": 2 * spec.qk_head_dim,
        "Dv": spec.v_head_dim,
        "fused": fused,
        "rotary_dim": spec.rope.rotary_dim,
    }


class Sizes(dict):
    """The sizes of a call.

    Parameters
    ----------
    known : dict
        Those that are known beforehand.
    has_batch_size : bool
        Whether an array of B elements tells B. Otherwise CSR offsets do.
    count_dtype : str
        Type of the variables; the number of pages is int32.
    """

    def __init__(self, known: dict[str, Any], *, has_batch_size: bool, count_dtype: str):
        super().__init__(known)
        self.has_batch_size, self.count_dtype = has_batch_size, count_dtype

    def __missing__(self, size: str) -> Any:
        if size.isdigit():
            return int(size)
        if size == "B" and not self.has_batch_size:
            value = self["B + 1"] - 1
        elif size.endswith(" + 1") and (size != "B + 1" or self.has_batch_size):
            value = self[size.removesuffix(" + 1")] + 1
        else:
            dtype = "int32" if size == "P" else self.count_dtype
            value = name_value(VARIABLES.get(size, size), getattr(T, dtype)())
        self[size] = value
        return value

    def shape(self, sizes: tuple[str, ...]) -> list:
        """Return the sizes of an array."""
        values = [self[size] for size in sizes]
        return [n for value in values for n in (value if isinstance(value, tuple) else (value,))]
