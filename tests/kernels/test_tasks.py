# SPDX-License-Identifier: Apache-2.0
"""How kernels cut their work: any number of threads, and counts that need more than 32 bits."""

from types import SimpleNamespace

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.script import tirx as T

from tir_kernels.cpu.attention.mla import SequenceTiles
from tir_kernels.cpu.isa.simd import import_llvm
from tir_kernels.cpu.page_ops.arrays import match
from tir_kernels.cpu.tasks import Queue, Splits
from tir_kernels.define import target_attributes
from tir_kernels.script import prim_func
from tir_kernels.semantics.visibility import CausalMask
from tvm_pagedkv.compiler.build import resolve_target
from tvm_pagedkv.compiler.lowering import compile_kernel

from ..support.cases.kernels.attention_cases import PagedBatch, altered_kernels
from ..support.cases.kernels.kernel_specs import F32, make_spec
from ..support.cases.kernels.mla_cases import LatentBatch
from ..support.cases.kernels.mla_cases import make_spec as make_mla_spec

NUM_THREADS = "runtime.NumThreads"


def compile_native(kernel):
    return compile_kernel(kernel, "kernel", resolve_target("native"))["kernel"]


@pytest.fixture
def many_threads():
    """Kernels are told of 200 threads; TVM's pool runs their tasks on those that it has."""
    real = tvm.get_global_func(NUM_THREADS)
    tvm_ffi.register_global_func(NUM_THREADS, lambda: 200, override=True)
    yield 200
    tvm_ffi.register_global_func(NUM_THREADS, real, override=True)


@pytest.fixture
def counted_tasks(monkeypatch):
    """The numbers of tasks that kernels make, which are compiled anew and tell them."""
    seen = []
    tvm_ffi.register_global_func("tests.saw_tasks", seen.append, override=True)
    parallel = T.parallel

    def counted(num_tasks, **options):
        T.evaluate(T.call_packed("tests.saw_tasks", num_tasks))
        return parallel(num_tasks, **options)

    monkeypatch.setattr(T, "parallel", counted)
    with altered_kernels():
        yield seen
    tvm_ffi.get_global_func("tests.saw_tasks")
    tvm_ffi.remove_global_func("tests.saw_tasks")


@pytest.mark.parametrize(
    "heads, lengths",
    [((4, 2), [(1, 9000), (1, 3), (1, 700), (1, 0)]), ((2, 1), [(1, 30_000)])],
    ids=["some", "one"],
)
def test_decode_uses_every_thread(many_threads, counted_tasks, heads, lengths):
    case = PagedBatch(make_spec(heads, 16, page=4), lengths, 0)
    case.decode()
    assert counted_tasks[0] == many_threads  # others may merge
    case.verify()


def test_mla_uses_every_thread(many_threads, counted_tasks):
    """One row on many positions, cut into as many splits; the second tasks merge."""
    case = LatentBatch(make_mla_spec(4, (24, 8), (F32, F32)), [(1, 30_000), (3, 70)], 0)
    case.run()
    assert counted_tasks == [many_threads] * 2
    case.verify()


def splits_kernel():
    @prim_func
    def splits_kernel(begins: T.handle, counts: T.handle, total: T.int64, num_tasks: T.int32):
        """Tell where the splits begin, and how many there are."""
        T.func_attr(target_attributes(on_cpu=True))
        begins_of = match(begins, (T.int64(),), "int64")
        count = match(counts, (1,), "int32")
        splits = Splits(total, num_tasks)
        splits.begin(1000)
        count[0] = splits.count
        for split_id in range(splits.count + 1):
            begins_of[split_id] = splits.first_item(split_id)

    return splits_kernel


def queue_kernel(each: int, num_owners: int):
    @prim_func
    def queue_kernel(handle: T.handle):
        """Take the last five items of `num_owners` that have `each`."""
        T.func_attr(target_attributes(on_cpu=True))
        taken = match(handle, (10, 2), "int32")
        queue = Queue()
        queue.next[0] = T.int64(num_owners * each - 5)
        at = 0
        import_llvm(Queue.llvm_helper)
        item = queue.take()
        first = T.int64(0)
        for owner in range(num_owners):
            while item < first + T.int64(each):
                taken[at, 0] = owner
                taken[at, 1] = T.cast(item - first, "int32")
                at += 1
                item = queue.take()
            first += T.int64(each)

    return queue_kernel


@pytest.mark.parametrize("num_tasks", [1, 2, 7, 200, 5000])
@pytest.mark.parametrize("total", [5000, 2**31 - 1, 2**31 + 12345, 2**40 + 1])
def test_splits_cover_any_number_of_items(total, num_tasks):
    kernel = compile_native(splits_kernel())
    begins = tvm.runtime.tensor(np.zeros(num_tasks * Splits.ROUNDS + 1, np.int64))
    count = tvm.runtime.tensor(np.zeros(1, np.int32))
    kernel(begins, count, total, num_tasks)
    count = int(count.numpy()[0])
    begins = begins.numpy()[: count + 1]
    sizes = np.diff(begins)
    assert begins[0] == 0 and begins[-1] == total
    assert (sizes >= 0).all() and sizes.max() <= total // num_tasks + 1
    # In each round every task has as much, within one unit.
    rounds = sizes.reshape(-1, num_tasks)
    assert (rounds.max(axis=1) - rounds.min(axis=1) <= 1).all()
    assert len(rounds) == 1 or (rounds[1:-1].sum(axis=1) >= num_tasks).all()


def test_queue_passes_two_to_the_thirty_two_items():
    """Owners with as many items as 31 bits hold, of which the last few are taken."""
    each, num_owners = 2**31 - 1, 3
    taken = tvm.runtime.tensor(np.full((10, 2), -1, np.int32))
    compile_native(queue_kernel(each, num_owners))(taken)
    want = [[2, each - 5 + i] for i in range(5)] + [[-1, -1]] * 5
    np.testing.assert_array_equal(taken.numpy(), want)


def cost_kernel(spec):
    @prim_func
    def cost_kernel(
        q_handle: T.handle, pages_handle: T.handle, lengths_handle: T.handle, o: T.handle
    ):
        """Tell the cost of all tiles of a sequence."""
        T.func_attr(target_attributes(on_cpu=True))
        query_indptr = match(q_handle, (2,), "int32")
        page_indptr = match(pages_handle, (2,), "int32")
        lengths = match(lengths_handle, (1,), "int32")
        costs = match(o, (1,), "int64")
        a = T.meta_var(
            SimpleNamespace(
                batch_size=T.int32(1),
                query_indptr=query_indptr,
                page_indptr=page_indptr,
                lengths=lengths,
                mask=CausalMask(0),
            )
        )
        tiles = SequenceTiles(spec, a)
        tiles.begin()
        while tiles.has_next():
            tiles.advance()
        costs[0] = tiles.before

    return cost_kernel


def test_cost_of_a_batch_of_mla():
    """A million rows on a billion positions."""
    rows, entries, page = 2**20, 2**26, 16
    kernel = compile_native(cost_kernel(make_mla_spec(4, (24, 8), (F32, F32), page)))
    indptr = [tvm.runtime.tensor(np.array([0, end], np.int32)) for end in (rows, entries)]
    costs = tvm.runtime.tensor(np.zeros(1, np.int64))
    kernel(*indptr, tvm.runtime.tensor(np.array([page], np.int32)), costs)
    assert costs.numpy().tolist() == [rows * (entries * page // 64)]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
