# SPDX-License-Identifier: Apache-2.0
"""OpenVINO's PagedAttentionExtension on pages in random order, to which it appends the rows too.

Queries and outputs are float32, as its graphs have them; pages are of the case's type.
"""

from __future__ import annotations

import functools

import numpy as np
import openvino
import openvino.op
from openvino import Type, opset13

from bench_peers.peer import Peer, Prepared, Unsupported

PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
NO_INTS, NO_FLOATS = np.zeros(0, np.int32), np.zeros(0, np.float32)


def _parameter(kind: Type, shape: list[int], name: str):
    parameter = opset13.parameter(shape, kind, name=name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


def model(heads) -> openvino.Model:
    """A graph of one operator; its settings beyond plain attention are empty constants."""
    widths = {"query": heads.query * heads.dim, "key": heads.kv * heads.dim}
    widths["value"] = widths["key"]
    parameters = [_parameter(Type.f32, [-1, width], name) for name, width in widths.items()]
    for name in ("key_cache.0", "value_cache.0"):
        parameters.append(_parameter(Type.dynamic, [-1, -1, -1, -1], name))
    for name in ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins"):
        parameters.append(_parameter(Type.i32, [-1], name))
    longest = _parameter(Type.i32, [], "max_context_len")
    scale, no_window = np.float32(heads.dim**-0.5), np.int32(0)
    before = [scale, no_window, NO_FLOATS]  # the last one: ALiBi slopes
    after = [
        *(NO_INTS, NO_INTS, np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32), NO_FLOATS),
        *(np.int32(128), np.int32(16), np.zeros((0, 0, 0, 0), np.float32), np.int32(0)),
        *(NO_INTS, NO_INTS, NO_INTS, NO_INTS, np.zeros(0, np.uint8), NO_INTS),
    ]
    inputs = [
        *parameters,
        *(opset13.constant(np.asarray(x)) for x in before),
        longest,
        *(opset13.constant(np.asarray(x)) for x in after),
    ]
    attention = openvino.op._PagedAttentionExtension([x.output(0) for x in inputs])
    info = attention.get_rt_info()
    info["num_k_heads"] = info["num_v_heads"] = heads.kv
    info["k_head_size"] = info["v_head_size"] = heads.dim
    result = opset13.result(attention.output(0))
    return openvino.Model([result], [*parameters, longest], "attention")


class OpenVinoPaged(Peer):
    """``PagedAttentionExtension`` of the CPU plugin."""

    version = f"openvino {openvino.__version__}"
    kv_precision: str | None = None  # None: as the case's type

    def bind_caller(self) -> None:
        """OpenVINO places its threads itself, the caller among them."""

    @functools.cache  # noqa: B019  (lives as long as the process)
    def _compiled(self, dtype: str, heads):
        options = {
            "INFERENCE_NUM_THREADS": len(self.cpus),
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": True,
            "KV_CACHE_PRECISION": self.kv_precision or PRECISIONS[dtype],
            "INFERENCE_PRECISION_HINT": "bf16" if dtype == "bfloat16" else "f32",
        }
        return openvino.Core().compile_model(model(heads), "CPU", options)

    def prepare(self, case, inputs, dtype, heads) -> Prepared:
        compiled = self._compiled(dtype, heads)
        kinds = {name: x for x in compiled.inputs for name in x.names}
        rows, contexts = case.rows_and_contexts()
        block = kinds["value_cache.0"].partial_shape[2].get_length()  # K may have more rows: scales
        num_blocks = -(-contexts // block)
        starts = np.concatenate([[0], np.cumsum(num_blocks)])
        ids = np.random.default_rng(0).permutation(starts[-1])
        caches = {}
        for name in ("key_cache.0", "value_cache.0"):
            kind = kinds[name]
            shape = [x.get_length() for x in list(kind.partial_shape)[1:]]
            size = kind.element_type.size
            if self.kv_precision is None and size != inputs.k.itemsize:
                raise Unsupported(f"its pages are {kind.element_type.get_type_name()} {shape}")
            caches[name] = openvino.Tensor(kind.element_type, [len(ids), *shape])
        request = compiled.create_infer_request()
        for name, cache in caches.items():
            request.set_tensor(name, cache)

        def give(new: np.ndarray, queries: np.ndarray, step: dict) -> None:
            """Set the rows of a step, K and V by position, and its tables."""
            given = {
                "query": queries.astype(np.float32).reshape(len(new), -1),
                "key": inputs.k[new].astype(np.float32).reshape(len(new), -1),
                "value": inputs.v[new].astype(np.float32).reshape(len(new), -1),
            } | {name: np.asarray(values, np.int32) for name, values in step.items()}
            for name, values in given.items():
                request.set_tensor(name, openvino.Tensor(np.array(values, order="C")))

        # Fill the pages: a step in which each block is a sequence of its own.
        lengths = np.concatenate(
            [
                np.append(np.full(n - 1, block), c - (n - 1) * block)
                for n, c in zip(num_blocks, contexts, strict=True)
            ]
        )
        positions = np.arange(case.num_positions)
        give(
            positions,
            np.zeros((case.num_positions, heads.query, heads.dim)),
            {
                "past_lens": np.zeros(len(ids)),
                "subsequence_begins": np.concatenate([[0], np.cumsum(lengths)]),
                "block_indices": ids,
                "block_indices_begins": np.arange(len(ids) + 1),
                "max_context_len": block,
            },
        )
        request.infer()

        ends = np.cumsum(contexts)
        new = np.concatenate([np.arange(e - r, e) for e, r in zip(ends, rows, strict=True)])
        give(
            new,
            inputs.q,
            {
                "past_lens": contexts - rows,
                "subsequence_begins": np.concatenate([[0], np.cumsum(rows)]),
                "block_indices": ids,
                "block_indices_begins": starts,
                "max_context_len": contexts.max(),
            },
        )
        shape = (case.num_rows, heads.query, heads.dim)
        kind = kinds["key_cache.0"].element_type.get_type_name()
        page_bytes = sum(cache.byte_size for cache in caches.values())
        return Prepared(
            request.infer,
            lambda: request.get_output_tensor(0).data.reshape(shape),
            note=f"appends too, pages of {block} {kind}",
            num_bytes=page_bytes + 2 * inputs.q.nbytes if self.kv_precision else None,
        )


class OpenVinoU8(OpenVinoPaged):
    """OpenVINO with pages of 8 bits, its default on x86."""

    kv_precision = "u8"
