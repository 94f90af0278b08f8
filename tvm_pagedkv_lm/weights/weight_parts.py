# SPDX-License-Identifier: Apache-2.0
"""`Weight`: a weight of the model as parts of a checkpoint's tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..formats.weight_formats import QuantizedRows


class Part(NamedTuple):
    """A tensor of a checkpoint, or some of its rows.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Of the whole tensor; of one of its matrices if it has those of all experts.
    rows : (int, int), optional
        The first row and the one behind the last, of each group; None: all rows.
    groups : int
        Number of groups of consecutive rows, from each of which `rows` are taken.
    scale : float
        Factor on the values.
    paired : int
        Width of heads whose adjacent rows form pairs, which are put half a head apart; 0: none.
    expert : (int, int), optional
        Which expert's matrix or vector is taken of a tensor that has those of all experts, along
        its first axis, and their number; None: the tensor has none of others.
    transposed : bool
        Whether the matrix is transposed before rows are taken. `shape` is that of the checkpoint.
    as_columns : bool
        Whether the rows that are taken become columns.
    is_whole : bool
        Whether every worker has all of it, however the other parts of a weight are divided.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    groups: int = 1
    scale: float = 1.0
    paired: int = 0
    expert: tuple[int, int] | None = None
    transposed: bool = False
    as_columns: bool = False
    is_whole: bool = False

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.shape[:-1] if self.transposed else self.shape[1:]

    @property
    def in_features(self) -> int:
        """Number of columns of the result."""
        width = self.row_shape[-1]
        return self.size // width if self.as_columns else width

    @property
    def size(self) -> int:
        """Number of elements."""
        if self.rows is None:
            return math.prod(self.shape)
        return self.groups * (self.rows[1] - self.rows[0]) * math.prod(self.row_shape)

    def of(self, tensor: np.ndarray) -> np.ndarray:
        """Return the rows of the tensor, or of a tensor that has something for each of its rows."""
        if self.transposed:
            tensor = tensor.T
        width = tensor.shape[1:]
        if self.rows is not None:
            grouped = tensor.reshape(self.groups, -1, *width)
            tensor = grouped[:, slice(*self.rows)].reshape(-1, *width)
        if self.paired:
            pairs = tensor.reshape(-1, self.paired // 2, 2, *width)
            tensor = pairs.swapaxes(1, 2).reshape(-1, *width)
        return tensor.T if self.as_columns else tensor


@dataclass(frozen=True)
class Weight:
    """One weight of the model: parts of a checkpoint, concatenated along the first axis.

    Parameters
    ----------
    parts : tuple of Part
    is_matrix : bool
        Whether the result is packed for the linear kernel.
    split : {"rows", "columns", "first"}, optional
        How workers that share the layer divide every part: by rows or by columns; or "first": only
        the first worker has it, and the others have zeros. None: every worker has all of it.
    offset : float
        Constant that is added.
    experts, heads : int
        Number of matrices that are packed one after another, each of as many parts. A row needs
        those of all heads, and of few experts.
    """

    parts: tuple[Part, ...]
    is_matrix: bool
    split: str | None = None
    offset: float = 0.0
    experts: int = 1
    heads: int = 1

    @property
    def stack(self) -> int:
        """Number of matrices, of experts or of heads."""
        return self.experts * self.heads

    def of_stack(self) -> Iterator[Weight]:
        """Yield the weight of each matrix."""
        count = len(self.parts) // self.stack
        for first in range(0, len(self.parts), count):
            yield replace(self, parts=self.parts[first : first + count], experts=1, heads=1)

    def share(self, part: Part, values, shard: int, num_shards: int):
        """Return the share of a part that worker `shard` of `num_shards` has.

        The values are those of the part, quantized or not.
        """
        if isinstance(values, QuantizedRows):
            return values.map(lambda array: self.share(part, array, shard, num_shards))
        if self.split is None or part.is_whole:
            return values
        if self.split == "first":
            return values if shard == 0 else np.zeros_like(values)
        return np.split(values, num_shards, axis=("rows", "columns").index(self.split))[shard]


Weights = Iterator[tuple[str, Weight]]  # names of parameters, and where their values come from


def vector(
    ours: str,
    theirs: str,
    *shape: int,
    scale: float = 1.0,
    offset: float = 0.0,
    split: str | None = None,
) -> tuple[str, Weight]:
    """Return a weight that is no matrix: a tensor of this shape."""
    return ours, Weight((Part(theirs, shape, scale=scale),), False, split, offset)


class Output(NamedTuple):
    """Output features of a projection: those of a tensor, or some of them.

    Attributes
    ----------
    name : str
        Name of the projection.
    width : int
        Number of features.
    begin, group, groups : int
        The tensor has `groups` groups of `group` rows, and the features are the rows from `begin`
        on of each. A group of 0: the features are all rows.
    scale : float
        Factor on the features.
    paired, is_whole
        As for `Part`.
    """

    name: str
    width: int
    begin: int = 0
    group: int = 0
    groups: int = 1
    scale: float = 1.0
    paired: int = 0
    is_whole: bool = False

    def part(self, theirs: str, kind: str, columns: tuple[int, ...]) -> Part:
        """Return the part of a weight or a bias below `theirs`."""
        name = f"{theirs}.{self.name}.{kind}"
        if not self.group:
            shape: tuple[int, ...] = (self.width, *columns)
            return Part(name, shape, scale=self.scale, paired=self.paired, is_whole=self.is_whole)
        rows = self.begin, self.begin + self.width // self.groups
        shape = (self.groups * self.group, *columns)
        return Part(name, shape, rows, self.groups, self.scale, self.paired, is_whole=self.is_whole)


def slices(name: str, *widths: int, scales: Sequence[float] | None = None) -> list[Output]:
    """Return consecutive output features of one projection, with a scale for each slice."""
    ends = np.cumsum(widths).tolist()
    factors = scales or [1.0] * len(widths)
    return [
        Output(name, width, end - width, ends[-1], scale=scale)
        for end, width, scale in zip(ends, widths, factors, strict=True)
    ]


def halves(name: str, groups: int, width: int) -> list[Output]:
    """Return the first and the second half of each of `groups` heads of ``2 * width`` features."""
    return [Output(name, groups * width, begin, 2 * width, groups) for begin in (0, width)]


def rows(
    ours: str,
    theirs: str,
    outputs: Sequence[Output],
    in_features: int,
    *,
    bias: bool = False,
    is_split: bool = True,
) -> Weights:
    """Yield projections of one input as one matrix.

    Workers divide the rows of each projection, unless it is not `is_split`.
    """
    split = "rows" if is_split else None

    def parts(kind: str, *columns: int) -> tuple[Part, ...]:
        return tuple(each.part(theirs, kind, columns) for each in outputs)

    yield f"{ours}.weight", Weight(parts("weight", in_features), True, split)
    if bias:
        yield f"{ours}.bias", Weight(parts("bias"), False, split)


def channels(
    ours: str, theirs: str, outputs: Sequence[Output], width: int, *, bias: bool
) -> Weights:
    """Yield the weights of a short convolution, whose channels the workers divide."""
    parts = tuple(each.part(theirs, "weight", (1, width)) for each in outputs)
    yield f"{ours}_weight", Weight(parts, False, "rows")
    if bias:
        parts = tuple(each.part(theirs, "bias", ()) for each in outputs)
        yield f"{ours}_bias", Weight(parts, False, "rows")


def columns(
    ours: str, theirs: str, shape: tuple[int, int], *, bias: bool = False, scale: float = 1.0
) -> Weights:
    """Yield a projection whose input features the workers divide."""
    part = Part(f"{theirs}.weight", shape, scale=scale)
    yield f"{ours}.weight", Weight((part,), True, "columns")
    if bias:
        part = Part(f"{theirs}.bias", shape[:1], scale=scale)
        yield f"{ours}.bias", Weight((part,), False, "first")
