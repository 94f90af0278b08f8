# SPDX-License-Identifier: Apache-2.0
"""Try mlc-llm's model families over this package's cache, beside TVM's own cache.

Each family gets a small random checkpoint, which mlc-llm's own compiler compiles for this CPU. The
logits of prefill, chunks, batched decode, forks, pops and token trees are compared with
transformers; then decode steps are timed.

    python scripts/tools/try_mlc.py PATH_TO_CLONE_OF_MLC_LLM
    python scripts/tools/try_mlc.py PATH_TO_CLONE_OF_MLC_LLM llama gemma2 --folder DIR

With --folder, checkpoints and libraries are kept and used again; --steps time alone then measures.
Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mlc_trial.families import FAMILIES
from mlc_trial.report import print_table

STEPS = ("check", "time")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clone", type=Path, help="a checkout of mlc-llm")
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--folder", type=Path, help="keeps checkpoints, libraries and results")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each family")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of decode steps; more than one tells something on an idle machine only (default: 1)",
    )
    parser.add_argument("--no-stock", action="store_true", help="our cache alone")
    arguments = parser.parse_args()
    unknown = set(arguments.families) - set(FAMILIES)
    if unknown:
        parser.error(f"unknown families: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        for name in arguments.families or FAMILIES:
            _run(name, folder / name, arguments)
            print_table(folder, [name])
        print("\nall:")
        print_table(folder, arguments.families or [*FAMILIES])


def _run(name: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Try a family in a process of its own: a crash is a result like any other."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "mlc_trial.trial",
        str(arguments.clone.resolve()),
        name,
        str(folder),
    ]
    command += ["--no-stock"] if arguments.no_stock else []
    environment = os.environ | {"TVM_NUM_THREADS": str(arguments.threads)}
    for step in arguments.steps:
        with (folder / f"{step}.log").open("w") as log:
            try:
                done = subprocess.run(
                    [*command, step],
                    cwd=Path(__file__).parent,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=arguments.timeout,
                    check=False,
                )
                failure = f"exit status {done.returncode}" if done.returncode else None
            except subprocess.TimeoutExpired:
                failure = f"took more than {arguments.timeout:.0f} s"
        if failure:
            (folder / f"{step}.json").write_text(json.dumps({"failed": failure}))


if __name__ == "__main__":
    main()
