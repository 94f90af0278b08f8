# SPDX-License-Identifier: Apache-2.0
"""`CreationValues`: the values of a cache that are known when a model creates it."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax, tirx


@dataclass(frozen=True)
class CreationValues:
    """Numbers or variables of the model's function that creates a cache, and other expressions.

    Parameters
    ----------
    max_num_sequences, max_total_tokens, prefill_chunk_size, page_size : tirx.Var or int
        Capacities.
    sliding_window : tirx.Var or int
        1 if sequences may get a sliding window, else 0.
    enable_kv_transfer : tirx.Var or bool
    layer_indptr : relax.ShapeExpr
        The first layer of each pipeline stage, then the number of layers.
    rope_ext_factors : relax.Expr
        The factors of longrope; without longrope any value.
    """

    max_num_sequences: tirx.Var | int
    max_total_tokens: tirx.Var | int
    prefill_chunk_size: tirx.Var | int
    page_size: tirx.Var | int
    sliding_window: tirx.Var | int
    enable_kv_transfer: tirx.Var | bool
    layer_indptr: relax.ShapeExpr
    rope_ext_factors: relax.Expr
