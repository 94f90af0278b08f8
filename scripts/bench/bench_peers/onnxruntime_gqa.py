# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's GroupQueryAttention on dense K and V, which it also appends the step's rows to.

Past and present share buffers. A batch of several shapes is as many calls.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from bench_peers.peer import Peer, Prepared, Unsupported, together

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
CACHE = ("past_key", "past_value", "present_key", "present_value")


def model(dtype: int, heads) -> bytes:
    """A graph of one operator."""

    def tensor(name, shape, kind=dtype):
        return helper.make_tensor_value_info(name, kind, shape)

    width = heads.kv * heads.dim
    inputs = [tensor("query", ["b", "s", heads.query * heads.dim])]
    inputs += [tensor(name, ["b", "s", width]) for name in ("key", "value")]
    inputs += [tensor(name, ["b", heads.kv, "p", heads.dim]) for name in CACHE[:2]]
    inputs += [tensor("seqlens_k", ["b"], TensorProto.INT32)]
    inputs += [tensor("total_sequence_length", [1], TensorProto.INT32)]
    outputs = [tensor("output", ["b", "s", heads.query * heads.dim])]
    outputs += [tensor(name, ["b", heads.kv, "t", heads.dim]) for name in CACHE[2:]]
    node = helper.make_node(
        "GroupQueryAttention",
        [x.name for x in inputs],
        [x.name for x in outputs],
        domain="com.microsoft",
        num_heads=heads.query,
        kv_num_heads=heads.kv,
        scale=heads.dim**-0.5,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


class OnnxRuntimeGqa(Peer):
    """``com.microsoft.GroupQueryAttention``."""

    version = f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}"

    @functools.cache  # noqa: B019  (lives as long as the process)
    def _session(self, dtype: str, heads):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = len(self.cpus)
        options.log_severity_level = 3
        if len(self.cpus) > 1:  # of all threads but the caller's, counted from 1
            places = ";".join(str(cpu + 1) for cpu in self.cpus[1:])
            options.add_session_config_entry("session.intra_op_thread_affinities", places)
        providers = ["CPUExecutionProvider"]
        return onnxruntime.InferenceSession(model(TYPES[dtype], heads), options, providers)

    def prepare(self, case, inputs, dtype, heads) -> Prepared:
        if dtype not in TYPES:
            raise Unsupported(f"the operator has no {dtype} on CPUs")
        return together([self._part(*part, dtype, heads) for part in inputs.parts()])

    def _part(self, q, k, v, dtype, heads) -> Prepared:
        value = onnxruntime.OrtValue.ortvalue_from_numpy
        batch, rows = q.shape[:2]
        context = k.shape[1]
        session = self._session(dtype, heads)
        binding = session.io_binding()
        keys, values = (value(np.ascontiguousarray(x.swapaxes(1, 2))) for x in (k, v))
        new = [np.ascontiguousarray(x[:, context - rows :]) for x in (k, v)]
        given = {
            "query": value(q.reshape(batch, rows, -1)),
            "key": value(new[0].reshape(batch, rows, -1)),
            "value": value(new[1].reshape(batch, rows, -1)),
            "past_key": keys,
            "past_value": values,
            "seqlens_k": value(np.full(batch, context - 1, np.int32)),
            "total_sequence_length": value(np.array([context], np.int32)),
        }
        output = value(np.zeros((batch, rows, heads.query * heads.dim), q.dtype))
        taken = {"output": output, "present_key": keys, "present_value": values}
        for name, x in given.items():
            binding.bind_ortvalue_input(name, x)
        for name, x in taken.items():
            binding.bind_ortvalue_output(name, x)
        shape = (batch * rows, heads.query, heads.dim)
        return Prepared(
            functools.partial(session.run_with_iobinding, binding),
            lambda: output.numpy().reshape(shape),
            note="appends too",
        )
