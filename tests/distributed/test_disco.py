# SPDX-License-Identifier: Apache-2.0
"""Workers of Disco that run a model together: pipeline stages, sharded heads, and both at once.

The model is attention between two matrices in each layer, with residuals. It is compiled for the
workers' share of the heads; its reference is NumPy and knows one worker only.
"""

from __future__ import annotations

import functools

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import spec
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache as CacheObject
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode
from tvm_ffi import Shape

import tvm_pagedkv as pkv
from tvm_pagedkv.distributed import disco

from .. import reference
from ..support.harness.fast_compilation import MODEL_TARGET

HEADS, KV_HEADS, DIM, WIDTH, NUM_LAYERS, WINDOW = 4, 2, 16, 24, 3, 6
KINDS = ["mha", "mha_sliding", "mha"]
SM_SCALE = DIM**-0.5
CAPACITIES = (4, 256, 64, 16)
STEPS = (([0, 1], [9, 20]), ([0, 1], [1, 1]), ([1, 0], [3, 12]), ([0], [1]))


class Stages(nn.Module):
    """A function for each pipeline stage, over 1 / `num_shards` of the heads."""

    def __init__(self, num_shards: int, layer_indptr: list[int]):
        self.num_shards, self.layer_indptr = num_shards, layer_indptr
        self.heads, self.kv_heads = HEADS // num_shards, KV_HEADS // num_shards

    def create_kv_cache(
        self,
        max_num_sequences: tirx.Var,
        max_total_tokens: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
    ):
        return pkv.PagedKVCache(
            attn_kind=KINDS,
            max_batch_size=max_num_sequences,
            max_total_seq_len=max_total_tokens,
            prefill_chunk_size=prefill_chunk_size,
            page_size=page_size,
            support_sliding_window=0,
            layer_partition=relax.ShapeExpr(self.layer_indptr),
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            qk_head_dim=DIM,
            v_head_dim=DIM,
            mla_original_qk_head_dim=0,
            mla_original_v_head_dim=0,
            rope_mode=RopeMode.NORMAL,
            rope_scale=1,
            rope_theta=10000,
            rope_scaling={},
            rope_ext_factors=relax.prim_value(0),
            rotary_dim=DIM,
            enable_disaggregation=False,
            dtype="float32",
            target=MODEL_TARGET,
            layer_sliding_window_size=WINDOW,
        )

    def _layer(self, layer: int, x: nn.Tensor, cache, w_in: nn.Tensor, w_out: nn.Tensor):
        n, rows = x.shape[1], self.heads + 2 * self.kv_heads
        qkv = nn.op.reshape(nn.op.matmul(x, w_in), (1, n, rows, DIM))
        o = cache.attention_with_fused_qkv(layer, qkv, self.heads, SM_SCALE)
        y = nn.op.matmul(nn.op.reshape(o, (1, n, self.heads * DIM)), w_out)
        return x + (nn.op.ccl_allreduce(y, "sum") if self.num_shards > 1 else y)

    def _stage(self, stage: int, x: nn.Tensor, cache, weights: list[nn.Tensor]):
        for layer in range(*self.layer_indptr[stage : stage + 2]):
            x = self._layer(layer, x, cache, *weights[2 * layer : 2 * layer + 2])
        return x

    def forward_0(
        self, x: nn.Tensor, cache: CacheObject,
        w0: nn.Tensor, w1: nn.Tensor, w2: nn.Tensor, w3: nn.Tensor, w4: nn.Tensor, w5: nn.Tensor,
    ):  # fmt: skip
        return self._stage(0, x, cache, [w0, w1, w2, w3, w4, w5])

    def forward_1(
        self, x: nn.Tensor, cache: CacheObject,
        w0: nn.Tensor, w1: nn.Tensor, w2: nn.Tensor, w3: nn.Tensor, w4: nn.Tensor, w5: nn.Tensor,
    ):  # fmt: skip
        return self._stage(1, x, cache, [w0, w1, w2, w3, w4, w5])


def _build(path, num_shards: int, layer_indptr: list[int]) -> str:
    model = Stages(num_shards, layer_indptr)
    plain = {"param_mode": "none", "effect_mode": "none"}
    shapes = [
        [WIDTH, (model.heads + 2 * model.kv_heads) * DIM],
        [model.heads * DIM, WIDTH],
    ] * NUM_LAYERS
    forward = {
        "x": spec.Tensor([1, "n", WIDTH], "float32"),
        "cache": spec.Object(object_type=CacheObject),
        **{f"w{i}": spec.Tensor(shape, "float32") for i, shape in enumerate(shapes)},
        "$": plain,
    }
    names = ("max_num_sequences", "max_total_tokens", "prefill_chunk_size", "page_size")
    functions = {f"forward_{stage}": forward for stage in range(len(layer_indptr) - 1)}
    module, _ = model.export_tvm(
        {**functions, "create_kv_cache": dict.fromkeys(names, int) | {"$": plain}}
    )[:2]
    tvm.compile(module, target=MODEL_TARGET).export_library(str(path))
    return str(path)


@functools.cache
def _weights() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the QKV ``[WIDTH, heads, DIM]`` and output ``[HEADS, DIM, WIDTH]`` weights."""
    rng = np.random.default_rng(0)
    shapes = (WIDTH, HEADS + 2 * KV_HEADS, DIM), (HEADS, DIM, WIDTH)
    return [
        tuple((rng.standard_normal(shape) / 4).astype("float32") for shape in shapes)
        for _ in range(NUM_LAYERS)
    ]


def _shard(shard: int, num_shards: int) -> list[np.ndarray]:
    """The weights of one worker, as its functions take them."""
    parts = []
    for w_in, w_out in _weights():
        q, k, v = np.split(w_in, [HEADS, HEADS + KV_HEADS], axis=1)
        own = [np.split(x, num_shards, axis=1)[shard] for x in (q, k, v)]
        parts.append(np.concatenate(own, axis=1).reshape(WIDTH, -1))
        parts.append(np.split(w_out, num_shards)[shard].reshape(-1, WIDTH))
    return parts


class Reference:
    def __init__(self):
        rope = reference.Rope(rotary_dim=DIM)
        windows = [WINDOW if kind == "mha_sliding" else None for kind in KINDS]
        self.cache = reference.ReferenceCache(
            NUM_LAYERS, np.dtype("float32"), rope, "normal", windows
        )

    def step(self, seq_ids, lengths, x: np.ndarray) -> np.ndarray:
        for layer, (w_in, w_out) in enumerate(_weights()):
            qkv = np.einsum("nw,whd->nhd", x, w_in).astype("float32")
            o, _ = self.cache.attention(layer, seq_ids, lengths, qkv, KV_HEADS, SM_SCALE)
            x = (x + np.einsum("nhd,hdw->nw", o, w_out)).astype("float32")
        return x


def _run(session, path: str, num_shards: int, num_stages: int) -> None:
    num_workers = num_shards * num_stages
    module = session.load_vm_module(path, tvm.cpu())
    weights = [session.empty(w.shape, "float32") for w in _shard(0, num_shards)]
    for worker in range(num_workers):
        for ref, weight in zip(weights, _shard(worker % num_shards, num_shards), strict=True):
            ref.debug_copy_from(worker, np.ascontiguousarray(weight))
    cache = module["create_kv_cache"](*(Shape([n]) for n in CAPACITIES))
    state = {
        name: session.get_global_func(f"vm.builtin.kv_state_{name}")
        for name in ("add_sequence", "begin_forward", "end_forward", "fork_sequence")
    }
    forward = disco.stage_function(session, module, "forward")
    expected, rng = Reference(), np.random.default_rng(1)
    for seq_id in (0, 1):
        state["add_sequence"](cache, seq_id)
        expected.cache.add_sequence(seq_id)
    for step, (seq_ids, lengths) in enumerate(STEPS):
        x = rng.standard_normal((sum(lengths), WIDTH)).astype("float32")
        given = session.empty((1, *x.shape), "float32")
        for worker in range(num_workers):
            given.debug_copy_from(worker, x[None])
        state["begin_forward"](cache, Shape(seq_ids), Shape(lengths))
        y = forward(given, cache, *weights)
        state["end_forward"](cache)
        want = expected.step(seq_ids, lengths, x)
        for worker in range(num_workers - num_shards, num_workers):
            actual = y.debug_get_from_remote(worker).numpy()[0]
            reference.assert_close(actual, want, "float32", f"step {step} worker {worker}")


def _check_memory(session, path: str, layer_indptr: list[int]) -> None:
    """A cache has the pages of its stage's layers alone; threads let us look at it."""
    cache = session.load_vm_module(path, tvm.cpu())["create_kv_cache"](
        *(Shape([n]) for n in CAPACITIES)
    )
    # As engines count them, one more; of layers with the window too: four sequences could need all.
    num_pages = 256 // 16 + 1
    page_bytes = 2 * KV_HEADS * 16 * DIM * 4
    for stage in range(2):
        begin, end = layer_indptr[stage : stage + 2]
        own = cache.debug_get_from_remote(stage)
        assert own.description["stage"] == stage
        assert [layer["kind"] for layer in own.description["layers"]] == KINDS[begin:end]
        assert own.stats()["page_pool_bytes"] == (end - begin) * num_pages * page_bytes


def session_of(kind: str, *sizes: int):
    """A session, which ends when nothing refers to it."""
    return getattr(disco, f"{kind}_session")(*sizes)


def test_pipeline_stages(tmp_path):
    """One layer, then two."""
    path = _build(tmp_path / "model.so", 1, [0, 1, 3])
    threads = session_of("threaded", 2, 2)
    _run(threads, path, 1, 2)
    _check_memory(threads, path, [0, 1, 3])
    _run(session_of("process", 2, 2), path, 1, 2)


def test_tensor_parallel(tmp_path):
    path = _build(tmp_path / "model.so", 2, [0, 3])
    _run(session_of("process", 2), path, 2, 1)


def test_stages_of_sharded_heads(tmp_path):
    path = _build(tmp_path / "model.so", 2, [0, 2, 3])
    _run(session_of("threaded", 4, 2), path, 2, 2)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
