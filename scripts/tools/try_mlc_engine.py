# SPDX-License-Identifier: Apache-2.0
"""Run mlc-llm's C++ serving engine over this package's cache, beside TVM's own cache.

The engine is built from a clone with its submodules (tvm, xgrammar and tokenizers-cpp) against the
installed apache-tvm; Hugging Face's tokenizers stand in for those in Rust. It serves the included
model: batches with prefill in chunks, its prefix cache, continuations, aborts, drafts and trees of
drafts of a second model, and prefill in one engine with decode in another. It also serves a random
hybrid, Qwen3.5. Every answer is compared with transformers.

    python scripts/tools/try_mlc_engine.py PATH_TO_CLONE_OF_MLC_LLM
    python scripts/tools/try_mlc_engine.py PATH_TO_CLONE_OF_MLC_LLM drafts --folder DIR

With --folder, the engine and the models are kept and used again. Needs cmake, ninja, torch,
transformers, tokenizers, fastapi and shortuuid.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlc_trial.package import check_clone, import_from_clone

_KINDS = ("ours", "stock")
_SEED = 20260723


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clone", type=Path, help="a checkout of mlc-llm with its submodules")
    parser.add_argument("scenarios", nargs="*", help="default: all")
    parser.add_argument("--folder", type=Path, help="keeps what is built")
    parser.add_argument("--cache", choices=_KINDS, help="one of the caches alone")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).resolve()
        if arguments.cache is not None:
            _run(arguments.clone.resolve(), folder, arguments.cache, arguments.scenarios)
            return
        _build_engine(arguments.clone.resolve(), folder / "engine")
        command = [sys.executable, __file__, str(arguments.clone), *arguments.scenarios]
        for kind in _KINDS:  # each in a process of its own, because it may crash
            done = subprocess.run([*command, "--folder", str(folder), "--cache", kind], check=False)
            if done.returncode != 0:
                print(f"{kind}: exit status {done.returncode}")


def _build_engine(clone: Path, folder: Path) -> None:
    """Build mlc-llm's C++ library, or what has changed of it: two minutes on two CPUs."""
    check_clone(clone, "tvm", "xgrammar", "tokenizers-cpp")
    sources = Path(__file__).parent / "mlc_engine"
    definitions = [f"-DMLC_LLM={clone}", f"-DPython_EXECUTABLE={sys.executable}"]
    command = ["cmake", "-S", str(sources), "-B", str(folder), "-G", "Ninja", *definitions]
    subprocess.run(command, check=True)
    subprocess.run(["cmake", "--build", str(folder)], check=True)


def _run(clone: Path, folder: Path, kind: str, names: list[str]) -> None:
    """Run scenarios over one kind of cache and print a line for each."""
    from mlc_trial.build import ours, stock

    import_from_clone(clone, folder / "engine")
    from mlc_engine.engine import load_library
    from mlc_engine.scenarios import NAMES, Scenarios

    load_library()
    with (ours if kind == "ours" else stock)():
        scenarios = Scenarios(_opener(folder, kind), _continuation(folder), _SEED)
        for name in names or NAMES:
            try:
                result = getattr(scenarios, name)()
                text = ", ".join(f"{count} {what}" for what, count in result.items())
            except Exception as error:  # of any kind: it is the result of this cache
                traceback.print_exc()
                text = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
            print(f"{kind:6}{name:16}{text}", flush=True)


def _opener(folder: Path, kind: str) -> Callable[..., Any]:
    """Return the function that starts engines, with models that it prepares when first needed."""
    from mlc_engine.engine import Engine
    from mlc_engine.models import (
        CHECKPOINT,
        HYBRID,
        compiled,
        disturbed_copy,
        prepare,
        random_hybrid,
    )

    @functools.cache
    def prepared(is_draft: bool) -> Path:
        if is_draft:
            return prepare(disturbed_copy(folder / "disturbed", _SEED), folder / "draft")
        return prepare(CHECKPOINT, folder / "model")

    def open_engine(
        drafts: bool = False, disaggregation: bool = False, hybrid: bool = False, **settings: Any
    ) -> Engine:
        if hybrid:
            random_hybrid(folder / "random", _SEED)
            model = prepare(folder / "random", folder / "hybrid", HYBRID)
            return Engine([(model, compiled(model, folder / f"{kind}-hybrid.so", name=HYBRID))],
                          **settings)  # fmt: skip
        suffix = "-disaggregation" if disaggregation else ""
        library = compiled(prepared(False), folder / f"{kind}{suffix}.so", disaggregation)
        folders = [prepared(False), prepared(True)] if drafts else [prepared(False)]
        return Engine([(each, library) for each in folders], **settings)

    return open_engine


def _continuation(folder: Path) -> Callable[..., list[int]]:
    """Return transformers' continuation of a prompt, which remembers what was asked before."""
    from mlc_engine.models import Reference, random_hybrid

    @functools.cache
    def reference(hybrid: bool) -> Reference:
        return Reference(random_hybrid(folder / "random", _SEED) if hybrid else None)

    @functools.cache
    def continuation(prompt: tuple[int, ...], count: int, hybrid: bool) -> list[int]:
        return reference(hybrid).continuation([*prompt], count)

    return lambda prompt, count, hybrid=False: continuation(tuple(prompt), count, hybrid)


if __name__ == "__main__":
    main()
