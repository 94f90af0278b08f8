# SPDX-License-Identifier: Apache-2.0
"""Kernels of the language models in typical shapes, which `kernel_hashes.py` compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tir_kernels.spec import CudaTarget, RopeSpec, VectorTarget
from tvm_pagedkv.config import RecurrentConfig
from tvm_pagedkv_lm.config.expert_config import Experts
from tvm_pagedkv_lm.config.latent_config import Latent
from tvm_pagedkv_lm.config.query_scale import QueryScale
from tvm_pagedkv_lm.formats.weight_formats import FORMATS
from tvm_pagedkv_lm.kernels.linear.code_embedding import code_embedding
from tvm_pagedkv_lm.kernels.linear.code_matrix import CodeMatrix
from tvm_pagedkv_lm.kernels.linear.expert_linear import expert_linear
from tvm_pagedkv_lm.kernels.linear.head_linear import head_linear
from tvm_pagedkv_lm.kernels.linear.linear import embedding, linear
from tvm_pagedkv_lm.kernels.linear.packed_layout import PackedMatrix
from tvm_pagedkv_lm.kernels.linear.row_codes import encode_rows
from tvm_pagedkv_lm.kernels.rows import gates, norms, per_layer_kernels, row_kernels, stream_kernels
from tvm_pagedkv_lm.kernels.rows.channel_decay import kimi_inputs
from tvm_pagedkv_lm.kernels.rows.index_kernels import index_keys, index_queries
from tvm_pagedkv_lm.kernels.rows.latent_kernels import (
    latent_keys,
    latent_queries,
    latent_rows,
    merge_states,
)
from tvm_pagedkv_lm.kernels.rows.rotary_kernels import take_heads
from tvm_pagedkv_lm.kernels.rows.routing_kernels import combine, group_pairs, route, scale_pairs
from tvm_pagedkv_lm.kernels.rows.state_kernels import delta_inputs, gated_norm, mamba2_inputs

F32, F16, BF16 = "float32", "float16", "bfloat16"
_ROPE, _EPSILON = RopeSpec(rotary_dim=64), 1e-5
_Builders = Iterator[tuple[str, Callable]]


@dataclass(frozen=True)
class LmKernels:
    """The kernels of the language models for a target.

    Parameters
    ----------
    target : VectorTarget or CudaTarget
    """

    target: VectorTarget | CudaTarget

    def builders(self) -> dict[str, Callable]:
        """Return name -> function that builds the kernel."""
        found = dict(each for dtype in (F32, BF16) for each in self._norms_and_gates(dtype))
        if isinstance(self.target, VectorTarget):
            for dtype in (F32, BF16):
                found |= dict(self._rows(dtype))
            found |= dict(self._routing())
            for dtype in (F32, F16, BF16):
                found |= dict(self._packed(dtype))
            for name in FORMATS:
                found |= dict(self._codes(name))
        return found

    def _norms_and_gates(self, dtype: str) -> _Builders:
        how = (dtype, self.target)
        for features in (1024, 50):
            yield f"norm-{features}-{dtype}", partial(norms.norm, features, _EPSILON, *how)
            silu = partial(gates.gated, "silu", features, *how)
            yield f"silu-{features}-{dtype}", silu
        for name in ("residual", "scaled", "subtracts_mean"):
            chosen = {name: True}
            yield f"norm-{name}-{dtype}", partial(norms.norm, 1024, _EPSILON, *how, **chosen)
        for v in ("as_is", "unit", "unit_of_k"):
            shape = ((8, 128), (2, 128), 256, _EPSILON)
            yield f"qk_norm-{v}-{dtype}", partial(norms.qk_norm, *shape, *how, v=v)
        cut_off = partial(gates.gated, "gelu_tanh", 1024, *how, deviations=1.6)
        yield f"gate-cut-off-{dtype}", cut_off
        yield f"gate-clamped-{dtype}", partial(gates.clamped_gated, 1.702, 7.0, 1024, *how)
        yield f"gate-sigmoid-{dtype}", partial(gates.multiply, "sigmoid", 1024, *how)

    def _rows(self, dtype: str) -> _Builders:
        how, streams = (dtype, self.target), stream_kernels
        scale = QueryScale(8192, 0.1, 1)
        latent = Latent(512, 64, 128, 128, growth=(0.1, 8192))
        delta, kda, mamba2 = (
            RecurrentConfig(kind, num_heads, num_key_heads, 64, value_dim)
            for kind, num_heads, num_key_heads, value_dim in (
                ("gated_delta", 8, 4, 128),
                ("kda", 4, 4, 24),
                ("mamba2", 8, 1, 32),
            )
        )
        made: dict[str, Callable] = {
            "scale_queries": partial(row_kernels.scale_queries, 1024, 1536, scale),
            "take_rows": partial(row_kernels.take_rows, 1024),
            "take_columns": partial(row_kernels.take_columns, 1024, 128, 256),
            "scaled_sum": partial(row_kernels.scaled_sum, 512, 0.7),
            "take_heads": partial(take_heads, (2, 4, 128), 8, _ROPE),
            "take_heads-copied": partial(take_heads, (2, 4, 80), 8, None),
            "join_inputs": partial(per_layer_kernels.join_inputs, 1024, 3, 64, _EPSILON),
            "stack_streams": partial(streams.stack_streams, 4, 512),
            "merge_streams": partial(streams.merge_streams, 4, 512),
            "predict_streams": partial(streams.predict_streams, 4, 512),
            "correct_streams": partial(streams.correct_streams, 4, 1, 512),
            "add_to_streams": partial(streams.add_to_streams, 4, 512),
            "delta_inputs": partial(delta_inputs, delta),
            "kimi_inputs": partial(kimi_inputs, kda),
            "mamba2_inputs": partial(mamba2_inputs, mamba2, (0.001, 0.1)),
            "gated_norm-first": partial(gated_norm, (8, 64), 2, "gate_first", _EPSILON),
            "gated_norm-last": partial(gated_norm, (8, 64), 8, "gate_last", _EPSILON),
            "index_keys": partial(index_keys, 128, _EPSILON, _ROPE),
            "index_queries": partial(index_queries, 4, 128, _ROPE),
            "latent_rows": partial(latent_rows, latent, _EPSILON, _ROPE),
            "latent_queries": partial(latent_queries, latent, 4, _ROPE),
            "latent_keys": partial(latent_keys, latent, 4),
            "merge_states": partial(merge_states, 4, 128),
            "scale_pairs": partial(scale_pairs, 512, 4),
            "combine": partial(combine, 512, 4),
        }
        for name, build in made.items():
            yield f"{name}-{dtype}", partial(build, *how)

    def _routing(self) -> _Builders:
        grouped = Experts(
            64, 4, 128, "sigmoid", has_correction=True, num_groups=8, num_chosen_groups=3
        )
        yield "route", partial(route, Experts(64, 4, 128), self.target)
        yield "route-grouped", partial(route, grouped, self.target)
        yield "group_pairs", partial(group_pairs, grouped, self.target)
        yield "soft_cap", partial(row_kernels.soft_cap_logits, 1000, 30.0, self.target)

    def _packed(self, dtype: str) -> _Builders:
        for shape in ((200, 1030), (65, 33)):
            matrix = PackedMatrix(*shape, dtype, self.target)
            added = {"bias": True, "residual": True}
            yield f"linear-{shape[0]}-{dtype}", partial(linear, matrix, dtype, F32, **added)
        yield f"embedding-{dtype}", partial(embedding, matrix, 3.0)
        experts = partial(expert_linear, matrix, 8, 2, dtype, F32, gathers=True, bias=True)
        yield f"expert_linear-{dtype}", experts
        heads = partial(head_linear, matrix, 4, dtype, dtype, shares_rows=True)
        yield f"head_linear-{dtype}", heads

    def _codes(self, name: str) -> _Builders:
        matrix = CodeMatrix(200, 1024, FORMATS[name], self.target)
        yield f"linear-{name}", partial(linear, matrix, BF16, BF16, bias=True, residual=True)
        experts = partial(expert_linear, matrix, 8, 2, BF16, F32, gathers=False)
        yield f"expert_linear-{name}", experts
        if not FORMATS[name].is_mxfp4:
            yield f"embedding-{name}", partial(code_embedding, matrix, BF16)
        encoded = partial(encode_rows, 1024, BF16, as_words=matrix.multiplies_words)
        yield f"encode_rows-{name}", encoded
