# SPDX-License-Identifier: Apache-2.0
"""One argument of a kernel: the shape and the type of an array, or the type of a scalar.

Shapes name sizes by letters: T rows of Q in B sequences, S rows of ragged K and V, P pages in the
pool, N page ids, M tree nodes, R row ids, Hq query heads, Hk KV heads, Dqk and Dv columns.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from tvm.script import tirx as T

from ..define import F32, I32, aligned
from ..layout import match_pages
from ..script import name_value
from ..spec import KernelSpec

ROWS, PAGES = "rows", "pages"  # dtypes: those of a step's rows, and of the pages


class Lengths(enum.Enum):
    """The forms of `length_info`, by their shapes."""

    LAST_PAGE = ("B",)  # slots in use of the last page
    WINDOWS = ("L",)  # B, 3 * B or 4 * B numbers, see `visibility.GappedSequence`
    MATRIX = ("3", "B")  # as the stock cache passes it for windows


class Sizes(dict):
    """The sizes of a call by their letters; those that a call decides are int32 variables.

    Parameters
    ----------
    spec : KernelSpec
    lengths : Lengths, optional
        The form of `length_info`. Without that argument the CSR offsets tell B.
    """

    _VARIABLES = {
        "B": "batch_size",
        "B + 1": "num_starts",
        "T": "num_rows",
        "S": "num_columns",
        "P": "num_pages",
        "N": "num_page_ids",
        "M": "num_nodes",
        "R": "num_row_ids",
        "L": "num_lengths",
    }

    def __init__(self, spec: KernelSpec, lengths: Lengths | None):
        num_heads, num_kv_heads = spec.num_qo_heads, spec.num_kv_heads
        super().__init__(
            {"Hq": num_heads, "Hk": num_kv_heads, "Hq + 2 Hk": num_heads + 2 * num_kv_heads},
            Dqk=spec.qk_head_dim,
            Dv=spec.v_head_dim,
        )
        self.lengths = lengths

    def __missing__(self, letter: str):
        if letter.isdigit():
            return int(letter)
        if letter == "B" and self.lengths is None:
            size = self["B + 1"] - 1
        elif letter == "B + 1" and self.lengths is not None:
            size = self["B"] + 1
        else:
            size = name_value(self._VARIABLES[letter], T.int32())
        self[letter] = size
        return size

    def shape(self, letters: tuple[str, ...]) -> list:
        """Return the sizes of an array."""
        if letters == ("lengths",):
            letters = self.lengths.value
        return [self[letter] for letter in letters]


@dataclass(frozen=True)
class Argument:
    """An argument of kernels.

    Parameters
    ----------
    shape : tuple of str
        Sizes of an array by their letters, ``("lengths",)`` for a form of `Lengths`; of a scalar:
        none.
    dtype : str
        Of a scalar "int32", "int64" or "float32"; of an array "int32", "float32", `ROWS`, which is
        the type of a step's rows, or `PAGES`: the pool of a layer, whose shape `layout` knows.
    needs : callable, optional
        ``spec -> bool``: whether kernels of a spec take it; without: always.
    """

    shape: tuple[str, ...]
    dtype: str
    needs: Callable[[KernelSpec], bool] | None = None

    @property
    def parameter_dtype(self) -> str:
        """Return the type of the kernel's parameter."""
        return "handle" if self.shape else self.dtype

    def match(self, value, sizes: Sizes, spec: KernelSpec):
        """Match an array with its shape; a scalar is its value."""
        if not self.shape:
            return value
        if self.dtype == PAGES:
            return match_pages(value, sizes["P"], spec)
        shape = sizes.shape(self.shape)
        if self.dtype == "int32":
            return T.match_buffer(value, shape, elem_offset=T.int32(), **I32)
        if self.dtype == "float32":
            return T.match_buffer(value, shape, elem_offset=T.int64(), **F32)
        return T.match_buffer(value, shape, elem_offset=T.int64(), **aligned(spec, spec.dtype))


def array(shape: str, dtype: str, *, needs: Callable[[KernelSpec], bool] | None = None) -> Any:
    """Declare an array argument: a field of a dataclass, None in kernels without it.

    Parameters
    ----------
    shape : str
        As documentation writes it: ``"[T, Hq, Dqk]"``.
    dtype : str
    needs : callable, optional
        As `Argument` has them.
    """
    sizes = tuple(shape.strip("[]").split(", ")) if shape else ()
    return field(default=None, metadata={"argument": Argument(sizes, dtype, needs)})


def scalar(dtype: str, *, needs: Callable[[KernelSpec], bool] | None = None) -> Any:
    """Declare a scalar argument: a field of a dataclass, None in kernels without it."""
    return array("", dtype, needs=needs)


def arguments_of(inputs: type) -> dict[str, Argument]:
    """Return the arguments that a dataclass declares, by name."""
    return {f.name: f.metadata["argument"] for f in fields(inputs) if "argument" in f.metadata}
