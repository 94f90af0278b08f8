# SPDX-License-Identifier: Apache-2.0
"""Times on a device: CUDA events behind work that is queued before, or the host's clock."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
import tvm_ffi

MAX_RUNS = 40
AHEAD_CYCLES = 6_000_000  # of waiting on the GPU: some ms, in which the host queues the runs


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of a run: the median and the minimum of `n`."""

    median: float
    minimum: float
    n: int


class Clock:
    """Times runs on a device.

    Parameters
    ----------
    device : torch.device
        Of type "cuda" (events), or "cpu" (the host's clock).
    """

    def __init__(self, device: torch.device):
        self.device, self.is_gpu = device, device.type == "cuda"

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def time(self, run: Callable[[], object], seconds: float = 0.25) -> Time:
        """Time `run`, which queues its work: as many runs as fit the seconds, at least three."""
        run()
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        once = time.perf_counter() - start
        count = max(3, min(MAX_RUNS, int(seconds / max(once, 1e-6))))
        times = self._events(run, count) if self.is_gpu else self._host(run, count)
        return Time(statistics.median(times), min(times), len(times))

    def _events(self, run: Callable, count: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        torch.cuda._sleep(AHEAD_CYCLES)
        for begin, end in pairs:
            begin.record()
            run()
            end.record()
        self.wait()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]

    def _host(self, run: Callable, count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return times

    def time_alone(self, run: Callable[[], object], after: Callable[[], object]) -> Time:
        """Time `run` on an idle device, from the host's call to its end."""
        times = []
        for i in range(MAX_RUNS + 5):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            if i >= 5:
                times.append(time.perf_counter() - start)
            after()
        return Time(statistics.median(times), min(times), len(times))

    def time_short(self, runs: list[Callable[[], object]]) -> Time:
        """Time one of several runs that take microseconds, by replays of a graph of them all."""
        whole = self.time(self.recorded(runs))
        return Time(whole.median / len(runs), whole.minimum / len(runs), whole.n)

    def recorded(self, runs: list[Callable[[], object]]) -> Callable[[], object]:
        """Replays a CUDA graph of runs; where there is no GPU, does them."""

        def all_runs() -> None:
            for run in runs:
                run()

        if not self.is_gpu:
            return all_runs
        all_runs()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with tvm_ffi.use_torch_stream(torch.cuda.graph(graph)):
            all_runs()
        return graph.replay


def _copy_of(num_bytes: int, device: torch.device) -> Callable[[], object]:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def limits_of(clock: Clock, num_bytes: int = 2**31, size: int = 8192) -> dict[str, float]:
    """Copied bytes per second, read and written; flops per second of a product of bfloat16."""
    device = clock.device
    copy = clock.time(_copy_of(num_bytes, device))
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    product = clock.time(lambda: torch.matmul(a, b, out=out))
    return {"copy": 2 * num_bytes / copy.median, "bfloat16": 2 * size**3 / product.median}
