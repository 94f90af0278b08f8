# SPDX-License-Identifier: Apache-2.0
"""The move of what recurrent layers keep of tokens, their ingredients, to pages."""

from tvm.script import tirx as T

from ..define import attributes
from ..ingredients import Ingredients, match_ingredients
from ..layout import slot_offset, slot_page
from ..recurrent_spec import RecurrentSpec
from ..script import prim_func
from ..signatures.arrays import match_int32, row_matcher
from ..spec import ITEMSIZE
from ..targets import components_of
from ..vectors import F32


def recurrent_append(spec: RecurrentSpec):
    """Build the kernel that writes the ingredients of tokens to their slots.

    Arguments: k ``[T, num_key_heads, key_dim]``, v ``[T, num_heads, value_dim]``, log_decay float32
    ``[T, num_heads]`` (kda: ``[T, num_heads, key_dim]``), beta float32 ``[T, num_heads]`` (rules
    with a delta only), slots int32 ``[T]`` (a negative one: do not write), pages
    ``[P, page_size, row_width]``.
    """
    rows = spec.rows
    c, match_rows, match_gates = components_of(rows), row_matcher(rows), row_matcher(rows, F32)
    copied_bytes = 2 * spec.row_width * ITEMSIZE[spec.dtype]
    gates = spec.sections["log_decay"].shape

    @prim_func(absent=() if spec.is_delta else ("var_beta",))
    def recurrent_append(
        var_k: T.handle,
        var_v: T.handle,
        var_log_decay: T.handle,
        var_beta: T.handle,
        var_slots: T.handle,
        var_pages: T.handle,
    ):
        T.func_attr(attributes(rows))
        num_pages, n = T.int32(), T.int64()
        k = match_rows(var_k, n, spec.num_key_heads, spec.key_dim)
        v = match_rows(var_v, n, spec.num_heads, spec.value_dim)
        log_decay = match_gates(var_log_decay, n, *gates)
        beta = T.meta_var(match_gates(var_beta, n, spec.num_heads) if spec.is_delta else None)
        slots = match_int32(var_slots, n)
        pages = match_ingredients(var_pages, num_pages, spec)
        stored = T.meta_var(Ingredients.of(pages, spec))
        worker = c.Worker(rows)
        k_rows, v_rows = c.RowCopy(worker, k, stored.k), c.RowCopy(worker, v, stored.v)
        decay_rows = c.RowCopy(worker, log_decay, stored.log_decay)
        if spec.is_delta:
            beta_rows = c.RowCopy(worker, beta, stored.beta)
        for row in worker.items(n, copied_bytes):
            slot = slots[row]
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
