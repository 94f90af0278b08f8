# SPDX-License-Identifier: Apache-2.0
"""Declarations of arguments, and those of the attention kernels: one name and shape in all of them.

In shapes, Hq and Hk are query heads and KV heads, Dqk and Dv the columns of K and V; `signature`
has the other letters. int32 arrays may start at any element. On GPUs q, k, v, o and pages start at
multiples of 16 bytes, on CPUs at any element.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

ROWS = "dtype"  # the type of a step's rows: that of a spec, as are other names of its fields
PAGES = "pages"  # the type and the shape of pages, which `layout` knows


class Lengths(enum.Enum):
    """The forms of `lengths`, by their shapes."""

    LAST_PAGE = ("B",)  # slots in use of the last page
    WINDOWS = ("L",)  # B, 3 * B or 4 * B numbers, see `visibility.GappedSequence`
    MATRIX = ("3", "B")  # as the stock cache passes it for windows


@dataclass(frozen=True)
class Argument:
    """An argument of kernels.

    Parameters
    ----------
    shape : tuple of str
        Sizes of an array, as `signature` names them; of a scalar: none.
    dtype : str
        "int32", "int64" or "float32"; of rows `ROWS` or another field of a spec; `PAGES`.
    needs : callable, optional
        ``spec -> bool``: whether kernels of a spec take it; without: always.
    min_align : int
        Rows begin at multiples of as many bytes, or of more.
    """

    shape: tuple[str, ...]
    dtype: str
    needs: Callable[[Any], bool] | None = None
    min_align: int = 1

    @property
    def parameter_dtype(self) -> str:
        """Return the type of the kernel's parameter."""
        return "handle" if self.shape else self.dtype

    @property
    def is_int32_array(self) -> bool:
        """Whether it is an int32 array."""
        return bool(self.shape) and self.dtype == "int32"


def array(
    shape: str,
    dtype: str,
    *,
    needs: Callable[[Any], bool] | None = None,
    min_align: int = 1,
) -> Any:
    """Declare an array: a field of a dataclass, which is None in kernels without it.

    Parameters
    ----------
    shape : str
        As documentation writes it, ``"[T, Hq, Dqk]"``.
    dtype : str
    needs : callable, optional
    min_align : int
        As `Argument` has them.
    """
    sizes = tuple(shape.strip("[]").split(", "))
    return field(default=None, metadata={"argument": Argument(sizes, dtype, needs, min_align)})


def scalar(dtype: str, *, needs: Callable[[Any], bool] | None = None) -> Any:
    """Declare a scalar: a field of a dataclass, which is None in kernels without it."""
    return field(default=None, metadata={"argument": Argument((), dtype, needs)})


def arguments_of(inputs: type) -> dict[str, Argument]:
    """Return the arguments that a dataclass declares, by name."""
    return {f.name: f.metadata["argument"] for f in fields(inputs) if "argument" in f.metadata}


class Elements:
    """An array whose elements are computed where they are asked for."""

    def __init__(self, of: Callable):
        self.of = of

    def __getitem__(self, index):
        return self.of(index)


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Arguments of any attention kernel; None: the kernel does not have it.

    The skeletons also keep here what they derive from the arguments.

    Parameters
    ----------
    batch_size : int32 expression
        B: sequences, or shared segments.
    length_form : Lengths, optional
        The form of `lengths`.
    sequences : visibility.WholeSequence, optional
        The sequences: their lengths, and what they have dropped.
    mask : visibility.CausalMask, optional
        Which columns a row sees.
    rope : optional
        On CPUs: the rotation inside the kernel.
    tree : optional
        On GPUs: `tree_mask.NoTree`, or the tree whose nodes are the last columns.
    """

    # Query rows.
    q: Any = array("[T, Hq, Dqk]", ROWS)
    # CSR offsets: the rows of each sequence.
    query_indptr: Any = array("[B + 1]", "int32")
    # The RoPE position of a row, and of a sequence's first column.
    query_positions: Any = array("[T]", "int32")
    first_positions: Any = array("[B]", "int32")
    # CSR offsets into tree_order; a sequence without nodes has no tree.
    tree_order_indptr: Any = array("[B + 1]", "int32")
    # A node's depth-first number in its sequence, and the end of its subtree; where they are equal
    # nobody sees the node.
    tree_order: Any = array("[M, 2]", "int32")
    # Written: the output, and the base-2 log of the sum of exponentials.
    o: Any = array("[T, Hq, Dv]", ROWS)
    lse: Any = array("[T, Hq]", "float32")
    # 0: rows see every column.
    causal: Any = scalar("int32")
    # 1: rotate Q and K inside the kernel, by the spec's scale and theta.
    rotary_mode: Any = scalar("int32")
    rope_scale: Any = scalar("float32")
    rope_theta: Any = scalar("float32")
    # Factor on the logits.
    sm_scale: Any = scalar("float32")
    # Columns past its own that a row sees.
    row_reach: Any = array("[T]", "int32")
    # Positions that a row sees, its own included; -n: rows see those of their chunk of n positions.
    window: Any = scalar("int32")
    # Natural logits that join the softmax of all rows of a head; -inf: none.
    sink_logits: Any = array("[Hq]", "float32", needs=lambda spec: spec.sink_logits)

    # Derived.
    batch_size: Any = None
    length_form: Lengths | None = None
    sequences: Any = None
    mask: Any = None
    rope: Any = None
    tree: Any = None

    def q_position(self, row):
        """RoPE position of a row of Q; 0 in kernels that are not told."""
        return 0 if self.query_positions is None else self.query_positions[row]


@dataclass(frozen=True, kw_only=True)
class PagedInputs(AttentionInputs):
    """K and V lie in pages."""

    # The pool of the layer.
    pages: Any = array("pages", PAGES)
    # CSR offsets into page_ids, and page ids in the order of positions.
    page_indptr: Any = array("[B + 1]", "int32")
    page_ids: Any = array("[N]", "int32")
    # How many slots of the pages hold something.
    lengths: Any = array("[lengths]", "int32")


@dataclass(frozen=True, kw_only=True)
class FusedInputs(PagedInputs):
    """Rows are fused: Q, then K and V, which are appended to the pages first."""

    # Fused rows ``[Hq + 2 Hk, Dqk]``, not rotated.
    qkv: Any = array("[T, fused]", ROWS)
    # The position by which Q and K of a row are rotated.
    rope_positions: Any = array("[T]", "int32")
    # The slot of a row; a negative one: do not write.
    slots: Any = array("[T]", "int32")
    # 0: Q and K stay as they are.
    apply_rope: Any = scalar("int64")


@dataclass(frozen=True, kw_only=True)
class RaggedInputs(AttentionInputs):
    """K and V are ragged arrays."""

    k: Any = array("[S, Hk, Dqk]", ROWS)
    v: Any = array("[S, Hk, Dv]", ROWS)
    # CSR offsets into k and v.
    kv_indptr: Any = array("[B + 1]", "int32")


@dataclass(frozen=True, kw_only=True)
class SharedInputs(PagedInputs):
    """K and V lie in pages that the rows of several sequences share; B counts such segments."""

    # CSR offsets into row_ids, and the rows of Q of each segment.
    row_indptr: Any = array("[B + 1]", "int32")
    row_ids: Any = array("[R]", "int32")
    # Segments ``first .. last - 1`` are attended to.
    first_segment: Any = scalar("int32")
    last_segment: Any = scalar("int32")
