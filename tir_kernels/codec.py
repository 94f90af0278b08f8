# SPDX-License-Identifier: Apache-2.0
"""How pages keep rows of K and V in fewer bits: the definition of each format.

A row of a quantized cache is kept as codes and, for each group of its values, a scale: a value is
its code times the scale of its group. Sizes, groups and the range of codes come from here, for
kernels, the memory of a cache, checkpoints and transfers alike. The order of codes within bytes is
spelled again by the code that packs and unpacks them: `cpu/pages/codes.py`,
`cpu/pages/quantized_rows.py` and `cpu/rows/code_rows.py`, `cuda/tiles/codes.py`,
`cuda/components/quantized_rows.py` and, in NumPy, `cache/page_format.py` of the package.

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
from typing import Any

PAGE_ALIGNMENT = 64  # bytes: rows of codes do not straddle more cache lines than they must
_SCALE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Codec:
    """A format of quantized rows.

    Parameters
    ----------
    name : str
        The `kv_dtype` by which users choose it.
    storage_dtype : {"int8", "uint8"}
        Type of the bytes that hold codes. "uint8" with 8 bits: an 8-bit floating-point number.
        With 4 bits: two codes plus 8 in a byte, an element of the first half of the row in the low
        bits and the one half a row behind in the high bits. With 5 bits: codes plus 16, whose low
        four bits lie as with 4 bits; the fifth bits follow, that of column i in bit ``i % 8`` of
        byte ``i // 8``.
    bits : int
        Of a code: 8, 5 or 4.
    limit : float
        The code that the value of the largest magnitude gets. Negative: a value of that sign and
        its opposite both get it, for the scale takes the sign.
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
    bits: int
    limit: float
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
    def is_packed(self) -> bool:
        """Whether a byte holds the low bits of two codes, those of columns half a row apart."""
        return self.bits < 8

    @property
    def has_bit_plane(self) -> bool:
        """Whether the highest bits of the codes follow their low bits."""
        return self.bits == 5

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers, and not 8-bit floating-point numbers."""
        return self.is_packed or self.storage_dtype == "int8"

    @property
    def has_cuda_kernels(self) -> bool:
        """Whether kernels for GPUs know the codec."""
        return not self.has_bit_plane

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

    def groups(self, width: int, v_width: int) -> tuple[tuple[int, int], ...]:
        """Columns ``(begin, end)`` of each group of a row; no group straddles `v_width`."""
        if self.group_size:
            return tuple((b, b + self.group_size) for b in range(0, width, self.group_size))
        return ((0, width),) if v_width == width else ((0, v_width), (v_width, width))

    def scale_bytes(self, width: int, v_width: int) -> int:
        """Bytes of the scales of a row."""
        return len(self.groups(width, v_width)) * _SCALE_BYTES[self.scale_dtype]

    def page_bytes(self, num_rows: int, width: int, v_width: int) -> int:
        """Bytes of a page of `num_rows` rows (``page_size`` times the rows of a slot)."""
        used = num_rows * (self.row_bytes(width) + self.scale_bytes(width, v_width))
        return -(-used // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


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
        row_bytes = (c.row_bytes(width) + c.scale_bytes(width, v_width) for c in (self.k, self.v))
        used = num_rows // 2 * sum(row_bytes)
        return -(-used // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


_PACKED: dict[str, Any] = {"group_size": 32, "scale_dtype": "bfloat16", "has_hadamard": True}
CODECS = {
    codec.name: codec
    for codec in (
        Codec("int8", "int8", bits=8, limit=127.0),
        Codec("float8_e4m3fn", "uint8", bits=8, limit=448.0),
        Codec("int5", "uint8", bits=5, limit=-16.0, **_PACKED),
        Codec("int4", "uint8", bits=4, limit=-8.0, **_PACKED),
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
