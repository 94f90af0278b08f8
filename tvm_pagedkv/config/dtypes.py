# SPDX-License-Identifier: Apache-2.0
"""The types of a step's tensors and of pages."""

from __future__ import annotations

from collections.abc import Sequence

from .._checks import check_choice
from .._codecs import CODECS, codec_of

# tir_kernels.spec has the same table: a configuration must not import TVM for it.
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
DTYPES = tuple(ITEMSIZE)
KV_DTYPES = (*DTYPES, *CODECS)


def check_kv_dtype(name: str, value: str | Sequence[str]) -> str:
    """Return a `kv_dtype` in one string: a type, a codec, or a pair such as "int8,int4".

    Parameters
    ----------
    name : str
        What messages call the value.
    value : str or sequence of str
        A type of numbers or a codec, or the codec of K and that of V, in a sequence or with a
        comma between them.

    Raises
    ------
    ValueError, TypeError
        If there is no such type or codec.
    """
    names = value.split(",") if isinstance(value, str) else value
    is_list = isinstance(names, (tuple, list)) and all(isinstance(x, str) for x in names)
    if not is_list or len(names) not in (1, 2):
        raise TypeError(f"{name} must be a name, or a pair of the codecs of K and V, got {value!r}")
    first, last = names[0].strip(), names[-1].strip()
    if first == last:
        check_choice(name, first, KV_DTYPES)
        return first
    pair = f"{first},{last}"
    if codec_of(pair) is None:
        raise ValueError(
            f"{name} {value!r} is not a pair of codecs; K and V can each have one of "
            f"{', '.join(CODECS)}, and types that are not quantized only both"
        )
    return pair
