# SPDX-License-Identifier: Apache-2.0
"""The table of results: a row for each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FORMAT = "{:16} {:>8} {:>8} {:>8} {:>8} {:>9} {:>9} {:>6}  {}"
_HEAD = (
    "family", "ours s", "stock s", "error", "stock", "ours ms", "stock ms", "times", "notes"
)  # fmt: skip


def print_table(folder: Path, names: list[str]) -> None:
    """Print what the steps have left: seconds to compile, largest errors, decode steps."""
    print(_FORMAT.format(*_HEAD))
    for name in names:
        checked, timed = _load(folder / name / "check.json"), _load(folder / name / "time.json")
        ours, stock = checked.get("ours", {}), checked.get("stock", {})
        ms = timed.get("ms", {})
        times = ms["stock"] / ms["ours"] if {"ours", "stock"} <= set(ms) else None
        row = (
            _number(ours.get("compile_s"), ".0f"),
            _number(stock.get("compile_s"), ".0f"),
            _worst(ours),
            _worst(stock),
            _number(ms.get("ours"), ".3f"),
            _number(ms.get("stock"), ".3f"),
            _number(times, ".2f"),
        )
        print(_FORMAT.format(name, *row, "; ".join(_notes(checked, timed))), flush=True)


def _notes(checked: dict[str, Any], timed: dict[str, Any]) -> list[str]:
    notes = []
    for kind, result in {"check": checked, "time": timed}.items():
        if "failed" in result:
            notes.append(f"{kind}: {result['failed']}")
    for kind in ("ours", "stock"):
        result = checked.get(kind, {})
        if "failed" in result:
            notes.append(f"{kind}: {result['failed']}")
        wrong = {name: e for name, e in result.get("errors", {}).items() if not e <= 1e-4}
        if wrong:
            notes.append(f"{kind} wrong: " + ", ".join(f"{n} {e:.1e}" for n, e in wrong.items()))
    if timed.get("batch") == 1:
        notes.append("timed with one sequence")
    return notes


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _worst(result: dict[str, Any]) -> str:
    errors = list(result.get("errors", {}).values())
    if not errors:
        return "-"
    nan = [error for error in errors if error != error]
    return format(nan[0] if nan else max(errors), ".0e")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
