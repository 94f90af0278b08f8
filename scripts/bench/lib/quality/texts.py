# SPDX-License-Identifier: Apache-2.0
"""The texts that bench_quality.py reads."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from tvm_pagedkv_lm import DecoderModel

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from standard_library import sources  # noqa: E402

TEXTS = {
    "sources": "files of Python's standard library that train_tiny.py holds out",
    "docstrings": "docstrings of those files",
    "topics": "the language reference, which the included model was trained on",
}


def windows_of(
    name: str, model: DecoderModel, count: int, length: int, seed: int
) -> list[list[int]]:
    """Cut `count` windows of `length` tokens at random places out of a text.

    Every window begins with the token that the tokenizer puts before a text.

    Raises
    ------
    ValueError
        If the text is shorter than a window.
    """
    encoding = model.tokenizer.encode("")
    first = list(encoding.ids)
    tokens = model.tokenizer.encode(_text(name), add_special_tokens=False).ids
    kept = length - len(first)
    if len(tokens) < kept:
        raise ValueError(f"{name} has {len(tokens)} tokens, a window needs {kept}")
    begins = np.random.default_rng(seed).integers(len(tokens) - kept + 1, size=count)
    print(f"{count} windows of {length} tokens of {TEXTS.get(name, name)}, seed {seed}")
    return [first + tokens[begin : begin + kept] for begin in begins]


def _text(name: str) -> str:
    if name == "topics":
        return "\n".join(topics[key] for key in sorted(topics))
    if name == "sources":
        return "\n".join(sources()[1])
    if name == "docstrings":
        return "\n\n".join(_docstrings(source) for source in sources()[1])
    return Path(name).read_text(encoding="utf-8")


def _docstrings(source: str) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, kinds)]
    return "\n\n".join(text for text in found if text)
