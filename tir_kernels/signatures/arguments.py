# SPDX-License-Identifier: Apache-2.0
"""Declarations of arguments: the shape and the type of an array, or the type of a scalar."""

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
