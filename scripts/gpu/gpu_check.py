#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Checks on a machine with a GPU, from a folder that needs neither TVM's compiler nor nvcc there.

With --pack it writes the folder, on a machine that has both. In the folder it compares caches on
the GPU with plain NumPy, and then times their kernels beside apache-tvm's own, torch and
FlashInfer, and beside the copy bandwidth and the rate of matrix products of the same run. Every
section is a process of its own with a limit of time, so that one that crashes or hangs takes no
other with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from gpu_check_configs import NAMES, RECURRENT

HERE = Path(__file__).resolve().parent
TIMINGS = (
    *("decode", "rope_append", "begin_forward", "prefill", "few_rows"),
    *("graphs", "mla", "shared_prefix"),
)
SECTIONS = ("limits", *(f"caches {name}" for name in (*NAMES, RECURRENT)), *TIMINGS)
MAX_SECONDS = 90  # of a section


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pack", metavar="DIR", help="write the folder (needs nvcc, but no GPU)")
    parser.add_argument("--arch", action="append", help="to pack for (default 90a)")
    parser.add_argument("--python", default="3.12", help="of the other machine (default 3.12)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="sections whose name has TEXT")
    parser.add_argument(
        "--jobs", type=int, default=8, help="sections of caches at a time (default 8)"
    )
    parser.add_argument("--budget", type=float, default=420, help="seconds in all (default 420)")
    parser.add_argument("--json", metavar="FILE", help="write all records")
    parser.add_argument("--plot", metavar="FILE", help="draw shares (.png, .svg; matplotlib)")
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try the program itself"
    )
    parser.add_argument("--tiny", action="store_true", help="the smallest shapes, for that too")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of()
    if options.pack:
        sys.path.insert(0, str(HERE.parents[1]))
        from gpu_check_pack import pack

        pack(Path(options.pack), options.arch or ["90a"], options.python, options.device,
             options.tiny)  # fmt: skip
        return 0
    if not (HERE / "bundles").is_dir():
        sys.exit("there are no bundles beside this program; run it in a folder made by --pack")
    if options.section:
        sys.path[:0] = [str(HERE / "python"), str(HERE)]
        sys.path.append(str(HERE / "extra"))
        Path(options.result).write_text(json.dumps(run_section(options)))
        return 0
    return run_all(options)


# --- all sections -------------------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> int:
    """Run the sections one after the other; 0 when nothing was wrong."""
    start, results = time.perf_counter(), {}
    names = [n for n in SECTIONS if not options.only or any(text in n for text in options.only)]

    def run(name: str) -> None:
        began = time.perf_counter()
        left = options.budget - (began - start)
        results[name], text = run_child(options, name, min(left, MAX_SECONDS))
        failures = [f"FAILED: {failure}" for failure in results[name]["failures"]]
        print(
            "\n".join([f"--- {name} (from {began - start:.0f} s on)", text, *failures]), flush=True
        )

    # Caches wait for NumPy most of the time; timings need the GPU to themselves.
    timed = [name for name in names if not name.startswith("caches ")]
    for name in timed[:1]:  # does the GPU answer?
        run(name)
    if not any(result.get("is_hopeless") for result in results.values()):
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(run, [name for name in names if name not in timed]))
        for name in timed[1:]:
            run(name)
    records = [record for result in results.values() for record in result["records"]]
    limits = results.get("limits", {}).get("limits", {})
    about = next((r["about"] for r in results.values() if r.get("about")), "unknown device")
    print(f"\n{about}; {time.perf_counter() - start:.0f} s")
    from gpu_check_report import draw, print_table

    print_table(records, limits)
    failures = [f"{name}: {text}" for name, r in results.items() for text in r["failures"]]
    wrong = [r for r in records if r["error"] is not None and not r["error"] <= 1]
    failures += [f"{r['peer']}, {r['case']}: wrong result" for r in wrong if "ours" in r["peer"]]
    whole = {"about": about, "limits": limits, "records": records, "failures": failures}
    if options.json:
        Path(options.json).write_text(json.dumps({**whole, "sections": results}, indent=1))
    if options.plot:
        try:
            draw(records, limits, about, Path(options.plot))
        except ImportError as error:
            print(f"no plot: {error}")
    print("\n".join(["", f"{len(failures)} failures", *failures]) if failures else "\nno failures")
    return 1 if failures else 0


def run_child(options: argparse.Namespace, name: str, seconds: float) -> tuple[dict, str]:
    """A section in a process of its own: its result, and what it printed."""
    empty = {"records": [], "failures": []}
    if seconds < 5:
        return {**empty, "failures": ["left out: the time is used up (--budget)"]}, ""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--section", name, "--result", str(result)]
        command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
        threads = str(max(1, (os.cpu_count() or 1) // options.jobs))  # of NumPy
        environment = {"OPENBLAS_NUM_THREADS": threads, **os.environ, "PYTHONUNBUFFERED": "1"}
        printed = Path(folder) / "printed"
        failures = []
        with printed.open("w") as file:
            try:
                code = subprocess.run(
                    command, timeout=seconds, env=environment, stdout=file, stderr=file
                ).returncode
                if not result.is_file():
                    failures = [f"the process ended with code {code}"]
            except subprocess.TimeoutExpired:
                failures = [f"it did not end within {seconds:.0f} s"]
        text = printed.read_text().rstrip()
        if failures:
            return {**empty, "failures": failures}, text
        return json.loads(result.read_text()), text


# --- one section --------------------------------------------------------------------------------


class Section:
    """Results of a section, and how it reports them."""

    def __init__(self):
        self.start, self.failures, self.records = time.perf_counter(), [], []

    def tell(self, text: str) -> None:
        print(f"{time.perf_counter() - self.start:6.1f} s  {text}", flush=True)

    def attempt(self, what: str, run: Callable[[], object]) -> None:
        """Run it; what it raises is a failure, and no more."""
        try:
            said = run()
        except Exception as error:
            traceback.print_exc(limit=-4)
            self.failures.append(f"{what}: {sentence(error)}")
            return
        self.tell(f"{what}: {said or 'done'}")


def sentence(error: BaseException) -> str:
    """The first lines of a message."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


def run_section(options: argparse.Namespace) -> dict:
    """Run a section, and write its results, in the child process."""
    section, result, has_torch = Section(), {}, True
    try:
        try:
            import torch  # noqa: F401  (first: it brings the CUDA runtime that it needs)
        except ImportError:
            has_torch = False
        import tvm

        import tvm_pagedkv as pkv

        on_gpu = options.device == "cuda"
        device = tvm.cuda(0) if on_gpu else tvm.cpu()
        folder = HERE / "bundles"
        pkv.load_bundle(folder / NAMES[0], device=device)
        result["about"] = device.device_name if on_gpu else "the CPU"
    except Exception as error:
        return {"records": [], "failures": [sentence(error)], "is_hopeless": True}
    if options.section.startswith("caches "):
        run_caches(section, folder / options.section.split()[1], device, options.tiny)
    elif not has_torch:
        section.tell("torch is not installed: no timings")
    else:
        section.attempt(options.section, lambda: run_timing(section, options, device, result))
    return {**result, "records": section.records, "failures": section.failures}


def run_caches(section: Section, folder: Path, device, is_tiny: bool) -> None:
    """Caches of a bundle against the reference."""
    import gpu_check_caches as caches

    size, seconds, min_calls = (24, 0.0, 40) if is_tiny else (200, 8.0, 30)
    kernels = caches.load(folder, device)
    if folder.name == RECURRENT:
        call = partial(caches.check_recurrent, kernels, seconds, min_calls, is_tiny)
        return section.attempt("random calls", call)
    section.attempt("forwards", lambda: caches.check_forwards(kernels, size))
    section.attempt("parts of forwards", lambda: caches.check_parts(kernels, size))
    section.attempt("shared prefixes", lambda: caches.check_shared_prefix(kernels, size))
    section.attempt("random calls", lambda: caches.check_random(kernels, size, seconds, min_calls))
    section.attempt("kernels", lambda: caches.check_the_rest(kernels))


def run_timing(section: Section, options: argparse.Namespace, device, result: dict) -> str:
    """Limits of the machine, or timings of one kind."""
    import torch
    from gpu_check_clock import Clock, limits_of
    from gpu_check_speed import TINY, Sizes, Speed

    import tvm_pagedkv as pkv

    torch.manual_seed(0)
    clock = Clock(torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu"))
    if options.section == "limits":
        result["limits"] = limits_of(clock, *((2**20, 64) if options.tiny else ()))
        return str(result["limits"])
    bundles = {name: pkv.load_bundle(HERE / "bundles" / name, device=device) for name in NAMES}
    sizes = TINY if options.tiny else Sizes()
    speed = Speed(bundles, HERE / "stock", clock, sizes, section.tell)
    for record in getattr(speed, options.section)():
        section.records.append(dataclasses.asdict(record))
        section.tell(f"{record.case}: {record.peer}: {record.seconds * 1e6:.1f} us")
    return f"{len(section.records)} timings"


if __name__ == "__main__":
    sys.exit(main())
