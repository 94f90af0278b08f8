# SPDX-License-Identifier: Apache-2.0
"""OpenVINO's PagedAttentionExtension on pages in random order, to which it appends the rows too.

Queries and outputs are float32, as its graphs have them; pages are of the case's type.
"""

from __future__ import annotations

import functools

import numpy as np
import openvino
import openvino.op
from bench_cases import bits
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

    def bind_caller(self) -> None:
        """OpenVINO places its threads itself, the caller among them."""

    @functools.cache  # noqa: B019  (lives as long as the process)
    def _compiled(self, dtype: str, heads):
        options = {
            "INFERENCE_NUM_THREADS": len(self.cpus),
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": True,
            "KV_CACHE_PRECISION": PRECISIONS[dtype],
            "INFERENCE_PRECISION_HINT": "bf16" if dtype == "bfloat16" else "f32",
        }
        return openvino.Core().compile_model(model(heads), "CPU", options)

    def prepare(self, case, inputs, dtype, heads) -> Prepared:
        compiled = self._compiled(dtype, heads)
        kinds = {name: x for x in compiled.inputs for name in x.names}
        rows, contexts = case.rows_and_contexts()
        block = kinds["key_cache.0"].partial_shape[2].get_length()
        num_blocks = -(-contexts // block)
        starts = np.concatenate([[0], np.cumsum(num_blocks)])
        ids = np.random.default_rng(0).permutation(starts[-1])
        caches = {}
        for name, values in (("key_cache.0", inputs.k), ("value_cache.0", inputs.v)):
            kind = kinds[name]
            shape = [x.get_length() for x in list(kind.partial_shape)[1:]]
            if shape != [heads.kv, block, heads.dim] or kind.element_type.size != values.itemsize:
                raise Unsupported(f"its pages are {kind.element_type.get_type_name()} {shape}")
            caches[name] = openvino.Tensor(kind.element_type, [len(ids), *shape])
            pages, position = bits(caches[name].data), 0
            for i, context in enumerate(contexts):
                own = bits(values[position : position + context])
                own = np.pad(own, ((0, num_blocks[i] * block - context), (0, 0), (0, 0)))
                own = own.reshape(-1, block, *own.shape[1:]).swapaxes(1, 2)
                pages[ids[starts[i] : starts[i + 1]]] = own
                position += context
        ends = np.cumsum(contexts)
        new = np.concatenate([np.arange(e - r, e) for e, r in zip(ends, rows, strict=True)])
        given = {
            "query": inputs.q.astype(np.float32).reshape(case.num_rows, -1),
            "key": inputs.k[new].astype(np.float32).reshape(case.num_rows, -1),
            "value": inputs.v[new].astype(np.float32).reshape(case.num_rows, -1),
            "past_lens": (contexts - rows).astype(np.int32),
            "subsequence_begins": np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
            "block_indices": ids.astype(np.int32),
            "block_indices_begins": starts.astype(np.int32),
            "max_context_len": np.array(contexts.max(), np.int32),
        }
        request = compiled.create_infer_request()
        for name, values in given.items():
            request.set_tensor(name, openvino.Tensor(np.array(values, order="C")))
        for name, cache in caches.items():
            request.set_tensor(name, cache)
        shape = (case.num_rows, heads.query, heads.dim)
        return Prepared(
            request.infer,
            lambda: request.get_output_tensor(0).data.reshape(shape),
            note=f"appends too, pages of {block}",
        )
