# SPDX-License-Identifier: Apache-2.0
"""Cases of attention whose pages are quantized: the reference sees what the pages give back."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from tir_kernels.codec import CODECS
from tir_kernels.spec import KernelSpec

from .... import reference
from ....reference import quantized


def page_bytes_of(spec: KernelSpec, pages: np.ndarray, rng) -> tuple[np.ndarray, np.ndarray]:
    """Quantize pages ``[P, 2, Hk, page, D]`` (MLA ``[P, page, D]``), whose unused slots are NaN.

    Returns
    -------
    uint8 ``[P, page_bytes]``
        Unused slots and the padding hold random bytes.
    float32, the shape of the pages
        What they give back.
    """
    codec, width = spec.codec, spec.qk_head_dim
    v_width = spec.v_head_dim if spec.kind == "mla" else width
    row_shape = pages.shape[1:-1]
    size = codec.page_bytes(int(np.prod(row_shape)), width, v_width)
    data = rng.integers(0, 256, (len(pages), size), dtype=np.uint8)
    planes = quantized.page_planes(codec, data, row_shape, width, v_width)
    kept, own = [], np.split(pages, len(planes), axis=1)
    for (each, to_codes, to_scales), plane in zip(planes, own, strict=True):
        rows = quantized.rotate(each, plane, v_width)
        codes, scales = quantized.quantize(each, rows, v_width)
        used = ~np.isnan(plane).all(-1)
        to_codes[used] = quantized.code_bytes(each, codes)[used]
        to_scales[used] = scales.astype(to_scales.dtype)[used]
        kept.append(quantized.dequantize(each, codes, scales, v_width))
    return data, np.concatenate(kept, axis=1)


@functools.cache
def quantized_case(case: type) -> type:
    """The class of cases like `case`, with quantized pages.

    A spec's `kv_dtype` names the codec. Rows of K and V are drawn as float32 numbers.
    """

    class QuantizedCase(case):
        def __init__(self, spec: KernelSpec, *args, **how):
            super().__init__(dataclasses.replace(spec, kv_dtype="float32"), *args, **how)
            self.spec = spec
            self.quantize()

        def quantize(self) -> None:
            """Quantize the pages as they are now."""
            place = self.__dict__.setdefault("place", self.tensor)
            data, self.pages = page_bytes_of(self.spec, self.pages, self.rng)
            pages = self.pages

            def tensor(array, *shift):
                if array is pages:
                    return place(data)
                return place(array, *shift)

            self.tensor = tensor

        def compare(self, expected, *dtypes: str) -> None:
            # Q is multiplied by a matrix, or the columns of K behind V by a ratio of scales.
            is_exact = not self.spec.codec.has_hadamard and self.spec.kind != "mla"
            rounds_qk = self.is_inline or not is_exact
            reference.assert_state_close(self.state(), expected, *dtypes, rounds_qk=rounds_qk)

        @property
        def dtypes(self) -> tuple[str, ...]:
            return (self.spec.dtype,)

    QuantizedCase.__name__ = f"Quantized{case.__name__}"
    return QuantizedCase


ALL_CODECS = tuple(CODECS)
