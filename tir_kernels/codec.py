# SPDX-License-Identifier: Apache-2.0
"""How pages keep rows of K and V in fewer bits: the definition of each format.

A row of a quantized cache is kept as codes and, for each group of its values, a scale: a value is
its code times the scale of its group. Sizes, groups, the range of codes and where their bits lie
come from here, for kernels, the memory of a cache, checkpoints and transfers alike.

A page is a run of bytes::

    codes   [rows, page_size, row_bytes]     rows: K of each head, then V; one latent row for MLA
    scales  [rows, page_size, num_groups]    of type `scale_dtype`
    padding to a multiple of 64 bytes

Where K and V have codecs of their own, the codes of V follow those of K, and so do the scales.

The scale of a group is chosen when the row is appended and never changes:

* ``scale = extreme / limit``, rounded to `scale_dtype`, where ``extreme`` is the value of the
  largest magnitude (its magnitude, where `limit` is positive). A code is the nearest one to
  ``value * (1 / scale)``, in float32, limited to the range of codes.
* Where codes have less than 8 bits, the scale that is stored has the least squared error for these
  codes: ``scale * (products / squares)``, rounded to `scale_dtype`, of the sums of ``code * value *
  (1 / scale)`` and of ``code ** 2``; but it stays as it was where that is no normal number.
* A scale below the smallest normal float32 number is 0, and so are the values of the group.
* A group with a NaN or an infinity has the scale NaN: all its values come back as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

PAGE_ALIGNMENT = 64  # bytes: rows of codes do not straddle more cache lines than they must
_SCALE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class BitPlane:
    """Where some bits of every code of a row lie: together, in bytes of their own.

    Parameters
    ----------
    num_bits : int
        Bits of each code: 8, 4, 2 or 1. A byte has those of ``8 // num_bits`` columns, the first
        column's lowest.
    first_bit : int
        The number of the lowest of these bits in the code.
    has_neighbours : bool
        Whether a byte has the bits of neighbouring columns. If not, its columns are as far apart as
        the plane has bytes, so that neighbouring columns are in the same bits of neighbouring
        bytes.
    """

    num_bits: int
    first_bit: int = 0
    has_neighbours: bool = False

    @property
    def mask(self) -> int:
        """The bits of a code, moved to the lowest ones."""
        return (1 << self.num_bits) - 1

    @property
    def columns_per_byte(self) -> int:
        """Columns that share a byte."""
        return 8 // self.num_bits

    def num_bytes(self, width: int) -> int:
        """Bytes of the plane in a row of `width` values."""
        return width // self.columns_per_byte

    def columns(self, index: int, width: int) -> slice:
        """Return the columns whose bits are the ones number `index` of their bytes, in order."""
        if self.has_neighbours:
            return slice(index, width, self.columns_per_byte)
        num_bytes = self.num_bytes(width)
        return slice(index * num_bytes, (index + 1) * num_bytes)


@dataclass(frozen=True)
class Codec:
    """A format of quantized rows.

    Parameters
    ----------
    name : str
        The `kv_dtype` by which users choose it.
    storage_dtype : {"int8", "uint8"}
        Type of the bytes that hold codes. "uint8" with 8 bits: an 8-bit floating-point number.
        Codes of fewer bits are kept without a sign: less their `lowest`.
    limit : float
        The code that the value of the largest magnitude gets. Negative: a value of that sign and
        its opposite both get it, for the scale takes the sign.
    planes : tuple of BitPlane
        Where the bits of a code lie, from the lowest ones on. The planes of a row follow each
        other.
    group_size : int
        Values that share a scale; 0: a whole row (MLA: the columns that are V, and the others).
    scale_dtype : {"float32", "bfloat16"}
        Type of the scales.
    has_hadamard : bool
        Whether rows are multiplied with a Hadamard matrix before they are quantized, which spreads
        outliers; see `semantics.hadamard`. Q is multiplied too, and O is multiplied back.
    revision : int
        Add 1 whenever the bytes of a row change their meaning. Stores, checkpoints and transfers
        refuse rows of another revision.
    """

    name: str
    storage_dtype: str
    limit: float
    planes: tuple[BitPlane, ...] = (BitPlane(8),)
    group_size: int = 0
    scale_dtype: str = "float32"
    has_hadamard: bool = False
    revision: int = 1

    def check_row(self, width: int, v_width: int) -> None:
        """Check that rows of `width` values can be kept, the first `v_width` of which are V.

        Raises
        ------
        ValueError
            If they cannot be cut into groups.
        """
        for dim in (width, v_width) if self.group_size else ():
            if dim % self.group_size:
                raise ValueError(
                    f"kv_dtype {self.name!r} keeps one scale for {self.group_size} values, so head "
                    f"dims must be multiples of {self.group_size}, got {dim}; choose 'int8' or "
                    "'float8_e4m3fn', which have one scale for a row"
                )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return sum(plane.num_bits for plane in self.planes)

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds bits of several codes."""
        return self.bits < 8

    @property
    def has_high_bits(self) -> bool:
        """Whether the highest bits of the codes follow their low bits."""
        return len(self.planes) > 1

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers, and not 8-bit floating-point numbers."""
        return self.is_packed or self.storage_dtype == "int8"

    @property
    def has_cuda_kernels(self) -> bool:
        """Whether kernels for GPUs know the codec."""
        return not self.has_high_bits

    @property
    def lowest(self) -> int:
        """The lowest code of integers."""
        return -(1 << (self.bits - 1)) + int(self.limit > 0)

    @property
    def highest(self) -> int:
        """The highest code of integers."""
        return (1 << (self.bits - 1)) - 1

    @property
    def k(self) -> Codec:
        """The format of rows of K."""
        return self

    @property
    def v(self) -> Codec:
        """The format of rows of V."""
        return self

    def row_bytes(self, width: int) -> int:
        """Bytes of the codes of a row of `width` values."""
        return width * self.bits // 8

    def columns_apart(self, width: int) -> tuple[int, ...]:
        """Return the first of the columns that share bytes though they are apart, in order.

        With neighbouring columns from each of them on, every bit of some bytes is known.
        """
        step = min(p.num_bytes(width) for p in self.planes if not p.has_neighbours)
        return tuple(range(0, width, step))

    def planes_of(self, width: int) -> list[tuple[int, BitPlane]]:
        """Return the planes of a row of `width` values, each behind its first byte in the row."""
        sizes = [plane.num_bytes(width) for plane in self.planes]
        return list(zip(accumulate(sizes, initial=0), self.planes, strict=False))

    def unpack(self, data: Any, codes: Any) -> None:
        """Gather the codes of rows from their bytes: what is stored, without a sign.

        Parameters
        ----------
        data : uint8 array ``[..., row_bytes]``
        codes : uint8 array ``[..., width]``
            Zeros, which become the codes.
        """
        width = codes.shape[-1]
        for begin, plane in self.planes_of(width):
            part = data[..., begin : begin + plane.num_bytes(width)]
            for index in range(plane.columns_per_byte):
                bits = part >> index * plane.num_bits & plane.mask
                codes[..., plane.columns(index, width)] |= bits << plane.first_bit

    def groups(self, width: int, v_width: int) -> tuple[tuple[int, int], ...]:
        """Columns ``(begin, end)`` of each group of a row; no group straddles `v_width`."""
        if self.group_size:
            return tuple((b, b + self.group_size) for b in range(0, width, self.group_size))
        return ((0, width),) if v_width == width else ((0, v_width), (v_width, width))

    def scale_bytes(self, width: int, v_width: int) -> int:
        """Bytes of the scales of a row."""
        return len(self.groups(width, v_width)) * _SCALE_BYTES[self.scale_dtype]

    def sections(self, num_rows: int, width: int, v_width: int) -> list[Section]:
        """Return where the codes and the scales of a page's `num_rows` rows lie: one section."""
        return _sections([self], num_rows, width, v_width)

    def page_bytes(self, num_rows: int, width: int, v_width: int) -> int:
        """Bytes of a page of `num_rows` rows (``page_size`` times the rows of a slot)."""
        return _page_bytes(self.sections(num_rows, width, v_width))


class Section(NamedTuple):
    """Where the rows that have one codec lie in a page.

    Parameters
    ----------
    codec : Codec
    codes, scales : slice
        Bytes of a page, in the order of the rows.
    """

    codec: Codec
    codes: slice
    scales: slice


def _sections(codecs: list[Codec], num_rows: int, width: int, v_width: int) -> list[Section]:
    """Return the sections of a page whose rows are divided among `codecs`."""
    sizes = [codec.row_bytes(width) for codec in codecs]
    sizes += [codec.scale_bytes(width, v_width) for codec in codecs]
    ends = list(accumulate(num_rows // len(codecs) * size for size in sizes))
    parts = [slice(begin, end) for begin, end in pairwise([0, *ends])]
    count = len(codecs)
    return [Section(*each) for each in zip(codecs, parts[:count], parts[count:], strict=True)]


def _page_bytes(sections: list[Section]) -> int:
    """Return the bytes of a page, its padding included."""
    return -(-sections[-1].scales.stop // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


@dataclass(frozen=True)
class CodecPair:
    """The formats of pages whose rows of K and of V have codecs of their own.

    Parameters
    ----------
    k, v : Codec
        Two different ones.
    """

    k: Codec
    v: Codec

    @property
    def name(self) -> str:
        """The `kv_dtype`, such as "int8,int4"."""
        return f"{self.k.name},{self.v.name}"

    @property
    def revision(self) -> int:
        """A number that changes with the revision of either."""
        return 1000 * self.k.revision + self.v.revision

    @property
    def has_hadamard(self) -> bool:
        """Whether rows of K or of V are multiplied with a Hadamard matrix."""
        return self.k.has_hadamard or self.v.has_hadamard

    def check_row(self, width: int, v_width: int) -> None:
        """Check that rows of `width` values can be kept, as `Codec.check_row`.

        Raises
        ------
        ValueError
            If they cannot, or if one row is K and V, as with MLA.
        """
        if width != v_width:
            raise ValueError(
                f"kv_dtype {self.name!r} has a codec for K and another one for V, but the latent "
                "rows of MLA are both; choose one codec"
            )
        for codec in (self.k, self.v):
            codec.check_row(width, v_width)

    def sections(self, num_rows: int, width: int, v_width: int) -> list[Section]:
        """Return the sections of the rows of K and of V, a half of `num_rows` each."""
        return _sections([self.k, self.v], num_rows, width, v_width)

    def page_bytes(self, num_rows: int, width: int, v_width: int) -> int:
        """Bytes of a page of `num_rows` rows, half of which are K.

        Raises
        ------
        ValueError
            If the scales of V would not be aligned, which pages of one slot only can cause.
        """
        if num_rows // 2 * self.k.scale_bytes(width, v_width) % _SCALE_BYTES[self.v.scale_dtype]:
            raise ValueError(
                f"kv_dtype {self.name!r}: the scales of V would not begin at a multiple of "
                f"{_SCALE_BYTES[self.v.scale_dtype]} bytes; choose a page_size of 2 or more"
            )
        return _page_bytes(self.sections(num_rows, width, v_width))


_PACKED: dict[str, Any] = {"group_size": 32, "scale_dtype": "bfloat16", "has_hadamard": True}
# The two halves of a row in the low and the high bits of the same bytes.
_NIBBLES = BitPlane(4)
_FIFTH_BITS = BitPlane(1, first_bit=4, has_neighbours=True)
CODECS = {
    codec.name: codec
    for codec in (
        Codec("int8", "int8", limit=127.0),
        Codec("float8_e4m3fn", "uint8", limit=448.0),
        Codec("int5", "uint8", limit=-16.0, planes=(_NIBBLES, _FIFTH_BITS), **_PACKED),
        Codec("int4", "uint8", limit=-8.0, planes=(_NIBBLES,), **_PACKED),
    )
}
# Those of index keys: one scale for each key, as in DeepSeek V3.2.
KEY_CODECS = tuple(
    name for name, codec in CODECS.items() if not codec.group_size and not codec.has_hadamard
)


def codec_of(kv_dtype: str) -> Codec | CodecPair | None:
    """Return the codec that a `kv_dtype` names, or the pair, as in "int8,int4"; None: no codec."""
    if kv_dtype in CODECS:
        return CODECS[kv_dtype]
    names = kv_dtype.split(",")
    if len(names) != 2 or names[0] == names[1] or not all(name in CODECS for name in names):
        return None
    return CodecPair(*(CODECS[name] for name in names))
