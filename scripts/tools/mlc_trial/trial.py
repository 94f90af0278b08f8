# SPDX-License-Identifier: Apache-2.0
"""One step of one family: ``python -m mlc_trial.trial CLONE FAMILY FOLDER {check,time}``."""

from __future__ import annotations

import argparse
import functools
import json
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from .families import FAMILIES, Family
from .package import import_from_clone

_SEED = 20260723
_Context = Callable[[], AbstractContextManager]


def _check(arguments: argparse.Namespace, kinds: dict[str, _Context]) -> dict[str, Any]:
    """Compile with each cache and compare with transformers."""
    from .checkpoint import Reference  # imports torch
    from .scenarios import Check

    family = FAMILIES[arguments.family]
    reference = Reference(family, arguments.folder, _SEED)
    logits = functools.cache(lambda tokens: reference.logits(list(tokens)))
    results: dict[str, Any] = {}
    for kind, context in kinds.items():
        result: dict[str, Any] = results.setdefault(kind, {})
        try:
            with context():
                result["compile_s"] = _compile(family, reference, arguments.folder, kind)
            session = _session(family, arguments.folder, kind)
            check = Check(family, session, lambda tokens: logits(tuple(tokens)), _SEED)
            result["errors"] = check.errors
            check.run()
        except Exception as error:  # of any kind: it is the result of this cache
            traceback.print_exc()
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            result["failed"] = text[:120]
    return results


def _compile(family: Family, reference: Any, folder: Path, kind: str) -> float:
    """Compile unless it has been done; returns the seconds it took then or now."""
    from .build import compile_model, load_weights
    from .session import MAX_BATCH, MAX_CHUNK

    library, seconds = folder / f"{kind}.so", folder / f"{kind}.seconds"
    if not library.exists():
        limits = {"prefill_chunk_size": MAX_CHUNK, "max_batch_size": MAX_BATCH}
        took = compile_model(
            family.mlc_name, reference.config, library, family.quantization, **limits
        )
        seconds.write_text(str(took))
    weights = load_weights(family, reference.config, reference.weights)
    np.savez(folder / "weights.npz", *(weight.numpy() for weight in weights))
    return float(seconds.read_text()) if seconds.exists() else 0.0


def _session(family: Family, folder: Path, kind: str) -> Any:
    import tvm

    import tvm_pagedkv

    from .session import Session

    with np.load(folder / "weights.npz") as saved:
        weights = [tvm.runtime.tensor(saved[name]) for name in saved.files]
    try:
        if kind == "stock":
            tvm_pagedkv.use_stock_runtime()
        return Session(folder / f"{kind}.so", weights, family.window, family.is_hybrid)
    finally:
        tvm_pagedkv.use_pagedkv_runtime()


def _time(arguments: argparse.Namespace, kinds: dict[str, _Context]) -> dict[str, Any]:
    """Time decode steps of what has been compiled."""
    from .timing import decode_ms

    family, folder = FAMILIES[arguments.family], arguments.folder
    batch = 2 if family.decodes_equal_batches else 1
    built = [kind for kind in kinds if (folder / f"{kind}.so").exists()]
    sessions = {kind: _session(family, folder, kind) for kind in built}
    return {"batch": batch, "ms": decode_ms(sessions, batch)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("clone", type=Path)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("step", choices=("check", "time"))
    parser.add_argument("--no-stock", action="store_true")
    arguments = parser.parse_args()
    import_from_clone(arguments.clone)
    from .build import ours, stock

    kinds = {"ours": ours} if arguments.no_stock else {"ours": ours, "stock": stock}
    result = (_check if arguments.step == "check" else _time)(arguments, kinds)
    (arguments.folder / f"{arguments.step}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
