# SPDX-License-Identifier: Apache-2.0
"""Pages with the ingredients of recurrent layers, and views of the sections of their rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from .recurrent_spec import RecurrentSpec, Section
from .spec import ITEMSIZE


@dataclass(frozen=True)
class Ingredients:
    """The sections of the rows of pages: views of one array.

    Parameters
    ----------
    k : Buffer ``[num_pages, page_size, num_key_heads, key_dim]``
    v : Buffer ``[num_pages, page_size, num_heads, value_dim]``
    log_decay : Buffer, float32 ``[num_pages, page_size, num_heads]``, or also ``[.., key_dim]``
    beta : Buffer, float32 ``[num_pages, page_size, num_heads]``, or None
    """

    k: Any
    v: Any
    log_decay: Any
    beta: Any = None

    @staticmethod
    def of(pages, spec: RecurrentSpec) -> Ingredients:
        """Make the views of matched pages, after all arguments."""
        views = {name: _view(pages, name, s, spec) for name, s in spec.sections.items()}
        return Ingredients(**views)


def _view(pages, name: str, section: Section, spec: RecurrentSpec):
    page_itemsize, itemsize = ITEMSIZE[spec.dtype], ITEMSIZE[section.dtype]
    row = spec.row_width * page_itemsize // itemsize
    inner = [math.prod(section.shape[i + 1 :]) for i in range(len(section.shape))]
    view = T.decl_buffer(
        (pages.shape[0], spec.page_size, *section.shape),
        section.dtype,
        data=pages.data,
        strides=[T.int64(n) for n in (spec.page_size * row, row, *inner)],
        elem_offset=pages.elem_offset * page_itemsize // itemsize + section.begin // itemsize,
        align=itemsize,
        layout=None,  # or GPUs take one without strides
    )
    return IRBuilder.name(f"{name}_rows", view)
