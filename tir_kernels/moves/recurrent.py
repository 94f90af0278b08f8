# SPDX-License-Identifier: Apache-2.0
"""The move of what recurrent layers keep of tokens, their ingredients, to pages."""

from tvm.script import tirx as T

from ..define import attributes
from ..ingredients import Ingredients
from ..layout import slot_offset, slot_page
from ..recurrent_spec import RecurrentSpec
from ..script import prim_func
from ..signatures.states import RECURRENT_APPEND, IngredientInputs
from ..spec import ITEMSIZE
from ..targets import components_of


def recurrent_append(spec: RecurrentSpec):
    """Build the kernel that writes the ingredients of tokens to their slots."""
    rows = spec.rows
    c = components_of(rows)
    copied_bytes = 2 * spec.row_width * ITEMSIZE[spec.dtype]

    @prim_func(arguments=RECURRENT_APPEND.of(spec))
    def recurrent_append(a: IngredientInputs):
        T.func_attr(attributes(rows))
        stored = T.meta_var(Ingredients.of(a.pages, spec))
        worker = c.Worker(rows)
        k_rows, v_rows = c.RowCopy(worker, a.k, stored.k), c.RowCopy(worker, a.v, stored.v)
        decay_rows = c.RowCopy(worker, a.log_decay, stored.log_decay)
        if spec.is_delta:
            beta_rows = c.RowCopy(worker, a.beta, stored.beta)
        for row in worker.items(a.slots.shape[0], copied_bytes):
            slot = a.slots[row]
            if slot >= 0:
                page, offset = slot_page(slot, spec.page_size), slot_offset(slot, spec.page_size)
                for h in k_rows.rows(spec.num_key_heads):
                    k_rows.copy((row, h), (page, offset, h))
                for h in v_rows.rows(spec.num_heads):
                    v_rows.copy((row, h), (page, offset, h))
                if spec.decays_by_channel:
                    for h in decay_rows.rows(spec.num_heads):
                        decay_rows.copy((row, h), (page, offset, h))
                else:
                    for _ in decay_rows.rows(1):
                        decay_rows.copy((row,), (page, offset))
                if spec.is_delta:
                    for _ in beta_rows.rows(1):
                        beta_rows.copy((row,), (page, offset))

    return recurrent_append
