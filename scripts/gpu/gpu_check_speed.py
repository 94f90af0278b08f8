# SPDX-License-Identifier: Apache-2.0
"""Timings of the kernels of bundles: decode, prefill, MLA, a decode step's other parts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_check_peers as peers
import torch
import tvm
import tvm_ffi
from gpu_check_batches import Batch, Shape
from gpu_check_clock import Clock
from gpu_check_configs import CODED

import tvm_pagedkv as pkv

STEP_BATCH = 64
_OF_COPY = dict(limit="copy")
_OF_DECODE = dict(limit="copy", target=0.85)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes to measure: sequences and contexts of decode, rows of prefills short and long."""

    batches: tuple[int, ...] = (16, 64)
    context: int = 4096
    short: int = 512  # of all but one sequence of the skewed batch
    prefill: int = 8192
    few: int = 8
    step_context: int = 1024


TINY = Sizes((2,), 40, 5, 33, 3, 16)


@dataclasses.dataclass
class Record:
    """A measurement.

    Parameters
    ----------
    case, peer : str
    seconds : float
        The median.
    minimum, n :
        The best one, and how many there were.
    num_bytes, flops : int
        That have to be moved and done; 0: not of interest.
    limit : {"copy", "bfloat16", ""}
        What the share is of.
    target : float
        Minimum share, or maximum microseconds where there is no limit; 0: none.
    error : float or None
        Of sampled rows, in tolerances; None: not compared.
    note : str
    """

    case: str
    peer: str
    seconds: float
    minimum: float
    n: int
    num_bytes: int = 0
    flops: int = 0
    limit: str = ""
    target: float = 0.0
    error: float | None = None
    note: str = ""


def shape_of(config: pkv.KVCacheConfig, layer: int) -> Shape:
    spec = config.resolved().layers[layer]
    return Shape(
        spec.num_qo_heads,
        spec.num_kv_heads,
        spec.qk_head_dim,
        getattr(torch, config.dtype),
        config.page_size,
        spec.v_head_dim if spec.kind == "mla" else 0,
        spec.kv_dtype if spec.codec else "",
    )


class Speed:
    """Sections of timings; each yields records.

    Parameters
    ----------
    bundles : name -> Bundle
    stock : Path
        Folder with kernels of apache-tvm.
    clock : Clock
    sizes : Sizes
    tell : callable
        Takes a line of text: what could not be measured.
    """

    def __init__(self, bundles, stock: Path, clock: Clock, sizes: Sizes, tell: Callable):
        self.bundles, self.stock, self.clock = bundles, stock, clock
        self.sizes, self.tell = sizes, tell
        is_gpu = clock.is_gpu
        self.device = tvm.cuda(clock.device.index or 0) if is_gpu else tvm.cpu()

    def _kernel(self, name: str, layer: int, kernel: str):
        bundle = self.bundles[name]
        described = bundle.cache_map()["layers"][layer]
        return bundle.kernel_sets[described["kernel_set"]][kernel]

    def decode(self) -> Iterator[Record]:
        """Groups of 4 and 8 query heads, in both types, and codecs; even and skewed batches."""
        sizes = self.sizes
        for name in ("bfloat16", "bfloat16-wide", "float16", "float16-wide", *CODED):
            shape = shape_of(self.bundles[name].config, 0)
            for count in sizes.batches:
                contexts = [sizes.context] * count
                yield from self._attention(
                    name, "decode", shape, [1] * count, contexts, "even", _OF_DECODE
                )
                if count != sizes.batches[-1]:
                    continue
                rest = sum(contexts) - (count - 1) * sizes.short
                skewed = [sizes.short] * (count - 1) + [rest]
                yield from self._attention(
                    name, "decode", shape, [1] * count, skewed, "skewed", _OF_DECODE
                )

    def prefill(self) -> Iterator[Record]:
        """A long prompt, causal."""
        n = self.sizes.prefill
        for name in ("bfloat16", "bfloat16-wide", "float16", *CODED):
            shape = shape_of(self.bundles[name].config, 0)
            limit = dict(limit="bfloat16", target=0.5)
            yield from self._attention(name, "prefill", shape, [n], [n], "causal", limit)

    def few_rows(self) -> Iterator[Record]:
        """A few rows behind a long past: drafts that are verified, ends of prompts."""
        few, context = self.sizes.few, self.sizes.context
        shape = shape_of(self.bundles["bfloat16"].config, 0)
        for count in (1, 8):
            contexts = [8 * context // count] * count
            what = f"for {few} rows each"
            yield from self._attention("bfloat16", "prefill", shape, [few] * count, contexts, what)

    def graphs(self) -> Iterator[Record]:
        """Kernels that take scratch memory and launch two kernels, replayed from a CUDA graph."""
        shape = shape_of(self.bundles["bfloat16"].config, 0)
        for kernel, rows in (("decode", 1), ("prefill", self.sizes.few)):
            batch = Batch(shape, [rows], [self.sizes.context], self.clock.device)
            own, arguments = self._kernel("bfloat16", 0, kernel), batch.arguments(kernel)
            replay = self.clock.recorded([functools.partial(own, *arguments)])
            batch.o.fill_(torch.nan)
            time = self.clock.time(replay)
            case = f"{kernel} {shape.label}, {rows} on {self.sizes.context}, from a graph"
            yield Record(case, "ours", time.median, time.minimum, time.n, batch.num_bytes,
                         error=batch.error())  # fmt: skip

    def _attention(
        self, name, kernel, shape, rows, contexts, what, limit=_OF_COPY
    ) -> Iterator[Record]:
        batch = Batch(shape, rows, contexts, self.clock.device)
        size = f"{len(rows)} x {contexts[0]}" if len(set(contexts)) == 1 else (
            f"{len(rows) - 1} x {contexts[0]} + {contexts[-1]}"
        )  # fmt: skip
        case = f"{kernel} {shape.label}, {size} {what}"
        work = dict(num_bytes=batch.num_bytes, flops=batch.flops)
        own = self._kernel(name, 0, kernel)
        arguments = batch.arguments(kernel)
        runs = {"ours": lambda: (lambda: own(*arguments), lambda: batch.o)}

        def run_stock():
            function = peers.stock(self.stock, shape, kernel)
            return lambda: function(*arguments), lambda: batch.o

        if not shape.codec:
            runs["apache-tvm"] = run_stock
        if self.clock.is_gpu and not shape.codec:
            for each in peers.SDPA:
                runs[each] = lambda each=each: peers.sdpa(batch, each)
            runs["FlashInfer"] = lambda: peers.flashinfer(batch, kernel)
        for peer, make in runs.items():
            try:
                run, output = make()
                batch.o.fill_(torch.nan)
                time = self.clock.time(run)
                error = batch.error(output())
            except Exception as reason:
                if peer == "ours":
                    raise
                self.tell(f"not measured: {peer}, {case}: {_sentence(reason)}")
                continue
            own_limit = limit if peer == "ours" else dict(limit=limit["limit"])
            yield Record(case, peer, time.median, time.minimum, time.n, **work, **own_limit,
                         error=error)  # fmt: skip

    def mla(self) -> Iterator[Record]:
        """Absorbed attention of one row to latent rows."""
        config = self.bundles["bfloat16"].config
        layer = next(i for i, spec in enumerate(config.resolved().layers) if spec.kind == "mla")
        shape = shape_of(config, layer)
        for count in self.sizes.batches:
            contexts = [self.sizes.context] * count
            batch = Batch(shape, [1] * count, contexts, self.clock.device)
            function, arguments = self._kernel("bfloat16", layer, "mla_prefill"), None
            arguments = batch.arguments("mla_prefill")
            time = self.clock.time(lambda f=function, a=arguments: f(*a))
            case = f"MLA decode {shape.label}, {count} x {self.sizes.context}"
            yield Record(case, "ours", time.median, time.minimum, time.n, batch.num_bytes,
                         batch.flops, "copy", error=batch.error())  # fmt: skip

    def rope_append(self) -> Iterator[Record]:
        """Time what a decode step does to its new rows, before attention."""
        for name in ("bfloat16", "float16"):
            shape, device = shape_of(self.bundles[name].config, 0), self.clock.device
            heads = shape.num_qo_heads + 2 * shape.num_kv_heads
            batch = Batch(shape, [1] * STEP_BATCH, [self.sizes.step_context] * STEP_BATCH, device)
            slots = batch.integers(range(0, STEP_BATCH * shape.page_size, shape.page_size))
            qkvs = [batch.normal(STEP_BATCH, heads, shape.head_dim) for _ in range(16)]
            fixed = [batch.query_indptr, batch.positions, slots, batch.q, batch.pages]
            fixed = list(map(tvm_ffi.from_dlpack, fixed))
            own = self._kernel(name, 0, "rope_append")
            each = [tvm_ffi.from_dlpack(qkv) for qkv in qkvs]
            case = f"rope + append {shape.label}, {STEP_BATCH} rows"
            time = self.clock.time_short([functools.partial(own, x, *fixed, 1) for x in each])
            yield Record(case, "ours", time.median, time.minimum, time.n, target=6.0)
            try:
                rotate = peers.stock(self.stock, shape, "split_rotary")
                append = peers.stock(self.stock, shape, "transpose_append")
            except Exception as reason:
                self.tell(f"not measured: apache-tvm, {case}: {_sentence(reason)}")
                continue
            k, v = (batch.normal(STEP_BATCH, shape.num_kv_heads, shape.head_dim) for _ in range(2))
            k, v = map(tvm_ffi.from_dlpack, (k, v))
            _, positions, slots, q, pages = fixed

            def run_stock(x, rotate=rotate, append=append, k=k, v=v, p=positions, m=slots,
                          q=q, pages=pages):  # fmt: skip
                rotate(x, p, q, k, v, 1)
                append(pages, k, v, m)

            time = self.clock.time_short([lambda x=x: run_stock(x) for x in each])
            yield Record(case, "apache-tvm", time.median, time.minimum, time.n, note="2 kernels")

    def begin_forward(self) -> Iterator[Record]:
        """Time begin_forward up to the first kernel that can run, and a whole decode step."""
        bundle, size = self.bundles["bfloat16"], self.sizes.step_context
        tokens = STEP_BATCH * (size + 64)
        cache = bundle.create(
            self.device, max_num_sequences=STEP_BATCH, max_total_tokens=tokens,
            prefill_chunk_size=STEP_BATCH * size,
        )  # fmt: skip
        ids, ones = tvm_ffi.Shape(range(STEP_BATCH)), tvm_ffi.Shape([1] * STEP_BATCH)
        for seq_id in ids:
            cache.add_sequence(seq_id)
        cache.begin_forward(ids, [size] * STEP_BATCH)
        cache.end_forward()
        begin = tvm_ffi.get_global_func("vm.builtin.kv_state_begin_forward")
        end = tvm_ffi.get_global_func("vm.builtin.kv_state_end_forward")
        attend = tvm_ffi.get_global_func("vm.builtin.attention_kv_cache_attention_with_fused_qkv")
        spec = bundle.config.resolved().layers[0]
        heads = spec.num_qo_heads + 2 * spec.num_kv_heads
        dtype = getattr(torch, bundle.config.dtype)
        qkv = torch.randn(STEP_BATCH, heads, spec.qk_head_dim, device=self.clock.device).to(dtype)
        first = torch.zeros(8, device=self.clock.device)  # what follows does next to nothing
        qkv, out = tvm_ffi.from_dlpack(qkv), tvm_ffi.from_dlpack(torch.empty_like(
            qkv[:, : spec.num_qo_heads]))  # fmt: skip
        case = f"begin_forward to the first kernel, {STEP_BATCH} x {size}"

        def first_kernel() -> None:
            begin(cache, ids, ones, None)
            first.add_(1)

        def after() -> None:
            end(cache)
            cache_pop(cache)

        pop = tvm_ffi.get_global_func("vm.builtin.kv_state_popn")

        def cache_pop(cache) -> None:
            for seq_id in ids:
                pop(cache, seq_id, 1)

        time = self.clock.time_alone(first_kernel, after)
        yield Record(case, "ours", time.median, time.minimum, time.n, target=30.0)

        def step() -> None:
            begin(cache, ids, ones, None)
            attend(cache, 0, spec.qk_head_dim**-0.5, qkv, out, None)

        time = self.clock.time_alone(step, after)
        case = f"begin_forward and attention of a layer, {STEP_BATCH} x {size}"
        yield Record(case, "ours", time.median, time.minimum, time.n)

    def shared_prefix(self) -> Iterator[Record]:
        """A decode step of sequences over one prefix, read once or by each."""
        name, size = "bfloat16", self.sizes.context
        if not any(
            "shared" in kernel for each in self.bundles[name].kernel_sets for kernel in each
        ):
            self.tell("not measured: shared prefixes: the bundle has no kernels for them")
            return
        bundle, count = self.bundles[name], self.sizes.batches[-1]
        spec, dtype = bundle.config.resolved().layers[0], getattr(torch, bundle.config.dtype)
        heads = spec.num_qo_heads + 2 * spec.num_kv_heads
        rows = torch.randn(size, heads, spec.qk_head_dim, device=self.clock.device).to(dtype)
        for shares in (True, False):
            described = bundle.cache_map(
                max_num_sequences=count, max_total_tokens=count * (2 * size if not shares else 64)
                + size, prefill_chunk_size=size,
            )  # fmt: skip
            described["share_prefix"] = shares
            make = tvm_ffi.get_global_func("pagedkv.create")
            cache = make(described, list(bundle.kernel_sets), self.device)
            cache.add_sequence(0)
            cache.begin_forward([0], [size])  # of one layer, so not by `forward`
            cache.attention(0, rows)
            cache.end_forward()
            for child in range(1, count):
                cache.fork_sequence(0, child)
            ids, ones = list(range(count)), [1] * count
            cache.begin_forward(ids, ones)
            cache.attention(0, rows[:count])
            out = torch.empty(count, spec.num_qo_heads, spec.qk_head_dim, dtype=dtype,
                              device=self.clock.device)  # fmt: skip
            time = self.clock.time(lambda c=cache, o=out: c.attention(0, rows[:count], out=o))
            cache.end_forward()
            what = "read once" if shares else "read by each"
            case = f"decode over one prefix, {count} x {size}"
            yield Record(case, f"ours, {what}", time.median, time.minimum, time.n)


def _sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
