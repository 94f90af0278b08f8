# SPDX-License-Identifier: Apache-2.0
"""What each worker of a `ParallelModel` does: its share of a step over its share of the weights.

A mistake must reach the caller on all workers alike, and a worker of Disco that throws ends the
process. So every call answers with an object (a tensor, or a cache for worker 0 itself) or with
JSON: ``{"value": ...}``, or ``{"error": name of the type, "text": ...}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from tvm_pagedkv.cache import KVCache
from tvm_pagedkv.compiler import load_library, resolve_target
from tvm_pagedkv.distributed import Worker, current_worker

from ..blocks.decoder import row_width
from ..config.options import BuildOptions
from ..model.caches import Caches
from ..model.decoder_weights import load_parameters
from ..model.executable import executable_file
from ..model.machines import new_machine
from ..model.source import open_model
from ..model.weight_choice import with_formats


class ModelWorker:
    """The part of a model that one worker has, and its caches.

    Parameters
    ----------
    worker : Worker
    model, dtype, page_size, sliding_window, kv_dtype, state_dtype, weights, batch_invariant
    num_shards, layer_indptr
        As of `ParallelModel`.
    """

    def __init__(
        self,
        worker: Worker,
        model: str,
        dtype: str,
        page_size: int,
        sliding_window: bool,
        kv_dtype: str | None,
        state_dtype: str,
        weights: str,
        batch_invariant: bool,
        num_shards: int,
        layer_indptr: Sequence[int],
    ):
        source = open_model(model)
        self.worker, self.config = worker, source.config()
        options = BuildOptions(
            dtype,
            page_size,
            resolve_target(None),
            sliding_window,
            num_shards=num_shards,
            layer_indptr=tuple(layer_indptr),
            stage=worker.group,
            kv_dtype=kv_dtype,
            state_dtype=state_dtype,
            batch_invariant=batch_invariant,
        )
        tensors = source.tensors()
        self.options = with_formats(options, self.config, tensors, weights)
        self.parameters = load_parameters(self.config, self.options, tensors, worker.shard)
        library = executable_file(self.config, self.options)
        self.vm = new_machine(load_library(library, self.options.target))
        self.make_caches = Caches(self.config, self.options)
        self.caches: dict[int, KVCache] = {}
        self.ids = count()

    def create_cache(self, *sizes_and_choice: int) -> int:
        """Make a cache for this worker's layers and heads; return its number."""
        cache_id = next(self.ids)
        max_num_sequences, max_total_tokens, prefill_chunk_size, use_long_rope_factors = (
            sizes_and_choice
        )
        capacities = (max_num_sequences, max_total_tokens, prefill_chunk_size)
        cache = self.make_caches.create(
            capacities, use_long_rope_factors=bool(use_long_rope_factors)
        )
        self.caches[cache_id] = cache
        return cache_id

    def cache(self, cache_id: int) -> KVCache:
        """Return a cache by its number."""
        return self.caches[cache_id]

    def drop_cache(self, cache_id: int) -> None:
        """Free a cache, if this worker has it."""
        self.caches.pop(cache_id, None)

    def call(self, cache_id: int, method: str, *args: Any) -> Any:
        """Call a method of the cache. Text stands for bytes in hexadecimal."""
        values = [bytes.fromhex(each) if isinstance(each, str) else each for each in args]
        if method == "check_pop":
            return tvm_ffi.get_global_func("pagedkv.check_pop")(self.caches[cache_id], *values)
        return getattr(self.caches[cache_id], method)(*values)

    def describe(self) -> dict[str, Any]:
        """Describe the worker and its part of the model."""
        layers, shard = self.options.layers_of(self.config), self.worker.shard

        def heads(count: int) -> list[int]:
            share = count // self.options.num_shards
            return list(range(shard * share, (shard + 1) * share))

        return {
            "process": os.getpid(),
            "layers": list(layers),
            "heads": heads(self.config.num_heads),
            "kv_heads": heads(self.config.num_kv_heads),
            "weight_bytes": sum(_num_bytes(weight) for weight in self.parameters),
        }

    def step(
        self,
        cache_id: int,
        name: str,
        seq_ids: Sequence[int],
        lengths: Sequence[int],
        tokens: Sequence[int],
    ) -> tvm.runtime.Tensor | None:
        """Run a step; return the logits on the last stage.

        A worker that fails closes its sockets, and the others fail where they wait for it.
        """
        cache = self.caches[cache_id]
        try:
            with cache.forward(list(seq_ids), list(lengths)):
                logits = self._compute(name, cache, lengths, tokens)
                self.worker.barrier()  # the step ends on all workers or on none
            return logits
        except BaseException as error:
            self.worker.close()
            if self.worker.has_lost_peer:  # TVM may have changed the type of the error
                raise ConnectionError("another worker has failed") from error
            raise

    def _compute(self, name, cache, lengths, tokens) -> tvm.runtime.Tensor | None:
        options, function = self.options, self.vm
        if options.is_first:
            ids = tvm.runtime.tensor(np.asarray(tokens, "int32"))
            x = function["embed"](ids, self.parameters)
        else:
            x = tvm.runtime.empty((len(tokens), row_width(self.config)), options.dtype)
            self.worker.receive_into(x)
        if not options.is_last:
            self.worker.send_on(function["hidden"](x, cache, self.parameters))
            return None
        if name == "decode":
            return function["decode"](x, cache, self.parameters)
        rows = tvm.runtime.tensor(np.cumsum(lengths, dtype="int32") - 1)
        return function["prefill"](x, rows, cache, self.parameters)


def _num_bytes(tensor: tvm.runtime.Tensor) -> int:
    return int(np.prod(tensor.shape)) * tensor.dtype.itemsize


_COMMANDS = ("create_cache", "cache", "drop_cache", "call", "describe", "step")


def _load(options: str) -> str:
    """Make this thread's `ModelWorker`; answer with the process."""

    def load() -> int:
        worker = current_worker()
        worker.state = ModelWorker(worker, **json.loads(options))
        return os.getpid()

    return _answer(load)


def _run(command: str, *args: Any) -> Any:
    """Run a command of this thread's `ModelWorker`."""

    def run() -> Any:
        model = current_worker().state
        if command not in _COMMANDS or model is None:
            raise ValueError(f"unknown command {command!r}, or the model is not loaded")
        return getattr(model, command)(*args)

    return _answer(run)


def _answer(work: Callable[[], Any]) -> Any:
    try:
        value = work()
    except Exception as error:
        text = error.args[0] if error.args else ""
        return json.dumps({"error": type(error).__name__, "text": str(text)})
    if isinstance(value, tvm_ffi.Object | tvm_ffi.Tensor):
        return value
    return json.dumps({"value": value})


tvm_ffi.register_global_func("tvm_pagedkv_lm.load_worker", _load, override=True)
tvm_ffi.register_global_func("tvm_pagedkv_lm.run_worker", _run, override=True)
