# SPDX-License-Identifier: Apache-2.0
"""Arguments of the attention kernels, matched, as typed values.

An argument has one name, type and shape in all kernels. With T rows of Q in B sequences (decode:
``T = B``), S rows of ragged K and V, N page table entries, M tree nodes, Hq query heads and Hk KV
heads:

==================== ===================== ======== ================================================
argument             shape                 dtype    content
==================== ===================== ======== ================================================
q                    ``[T, Hq, Dqk]``      dtype    query rows
query_indptr             ``[B + 1]``           int32    CSR offsets: the rows of each sequence
pages                `layout.pages_shape`  kv_dtype the pool of the layer
page_indptr          ``[B + 1]``           int32    CSR offsets into page_ids
page_ids          ``[N]``               int32    page ids, in the order of positions
length_info          see `Lengths`         int32    how many slots of the pages hold something
k, v                 ``[S, Hk, Dqk | Dv]`` dtype    ragged K and V
kv_indptr            ``[B + 1]``           int32    CSR offsets into k and v
first_positions    ``[B]``               int32    RoPE position of a sequence's first column
query_positions      ``[T]``               int32    RoPE position of a row
tree_order_indptr    ``[B + 1]``           int32    CSR offsets into tree_order; no nodes: no tree
tree_order           ``[M, 2]``            int32    of a node: its depth-first number in its
                                                    sequence, and the end of its subtree; where
                                                    they are equal nobody sees the node
row_indptr, row_ids  ``[B + 1]``, ``[R]``  int32    rows of Q of a shared segment, CSR
o                    ``[T, Hq, Dv]``       dtype    output, written
lse                  ``[T, Hq]``           float32  base-2 log of the sum of exponentials, written
causal               scalar                int32    0: rows see every column
window               scalar                int32    positions that a row sees, its own included;
                                                    -n: rows see those of their chunk of n positions
sink_logits          ``[Hq]``              float32  natural logits that join the softmax of all
                                                    rows of a head; -inf: none
row_reach            ``[T]``               int32    columns behind its own that a row sees
rotary_mode          scalar                int32    1: rotate Q and K inside the kernel
rope_scale, _theta   scalar                float32  those of the spec, where rotary_mode is 1
sm_scale             scalar                float32  factor on the logits
qkv                  ``[T, Hq + 2 Hk, D]`` dtype    fused rows: Q, K and V, not rotated
rope_position        ``[T]``               int32    position that Q and K are rotated by
slots         ``[T]``               int32    slot of a row; a negative one: do not write
apply_rope           scalar                int64    0: Q and K stay as they are
first_, last_segment scalar                int32    segments ``first .. last - 1`` are attended to
==================== ===================== ======== ================================================

int32 arrays may start at any element. On GPUs q, k, v, o and pages start at multiples of 16 bytes,
on CPUs at any element.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.buffer import is_buffer_var


class Lengths(enum.Enum):
    """The forms of `length_info`."""

    LAST_PAGE = "last_page"  # [B]: slots in use of the last page
    WINDOWS = "windows"  # [B], [3 * B] or [4 * B], see `visibility.GappedSequence`
    MATRIX = "matrix"  # [3, B], as the stock cache passes it for windows

    def shape(self, batch_size, num_lengths) -> tuple:
        """The shape of the argument; `num_lengths` is any number."""
        return {
            Lengths.LAST_PAGE: (batch_size,),
            Lengths.WINDOWS: (num_lengths,),
            Lengths.MATRIX: (3, batch_size),
        }[self]


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
    lengths : visibility.WholeSequence, optional
        The lengths of the sequences, and what they have dropped.
    mask : visibility.CausalMask, optional
        Which columns a row sees.
    rope : optional
        On CPUs: the rotation inside the kernel.
    tree : optional
        On GPUs: `tree_mask.NoTree`, or the tree whose nodes are the last columns.
    """

    batch_size: Any
    q: Any
    o: Any
    lse: Any
    sm_scale: Any
    sink_logits: Any = None
    query_indptr: Any = None
    query_positions: Any = None
    first_positions: Any = None
    tree_order_indptr: Any = None
    tree_order: Any = None
    causal: Any = None
    window: Any = None
    row_reach: Any = None
    rotary_mode: Any = None
    rope_scale: Any = None
    rope_theta: Any = None
    lengths: Any = None
    mask: Any = None
    rope: Any = None
    tree: Any = None

    def q_position(self, row):
        """RoPE position of a row of Q; 0 in kernels that are not told."""
        return 0 if self.query_positions is None else self.query_positions[row]

    def __post_init__(self):
        for field in fields(self):  # errors of the launcher tell these names
            if is_buffer_var(value := getattr(self, field.name)):
                IRBuilder.name(field.name, value)


@dataclass(frozen=True, kw_only=True)
class PagedInputs(AttentionInputs):
    """K and V lie in pages."""

    pages: Any
    page_indptr: Any
    page_ids: Any
    length_info: Any = None
    length_form: Lengths = Lengths.LAST_PAGE


@dataclass(frozen=True, kw_only=True)
class FusedInputs(PagedInputs):
    """`q` has fused rows: Q, then K and V, which are appended to the pages first."""

    rope_position: Any
    slots: Any
    apply_rope: Any


@dataclass(frozen=True, kw_only=True)
class RaggedInputs(AttentionInputs):
    """K and V are ragged arrays."""

    k: Any
    v: Any
    kv_indptr: Any


@dataclass(frozen=True, kw_only=True)
class SharedInputs(PagedInputs):
    """K and V lie in pages that the rows of several sequences share; B counts such segments."""

    row_indptr: Any
    row_ids: Any
    first_segment: Any
    last_segment: Any
