# SPDX-License-Identifier: Apache-2.0
"""The bundle that tests write: its configuration, its attention, and changes of its manifest."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi

import tvm_pagedkv as pkv

from .... import reference
from ....reference.rope import Rope
from ...harness.foreign_code import runs_here

ROWS, SEQUENCE = 37, 7
SCALING = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 16 for i in range(16)],
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 4096,
}
CONFIG = {
    "num_layers": 2,
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "qk_head_dim": 32,
    "dtype": "float32",
    "max_total_tokens": 512,
    "rope": {"scaling": SCALING},
}
IS_X86 = platform.machine() == "x86_64"
SECOND = ["x86-64-v3"] if runs_here("x86-64-v3") else []


def inputs() -> np.ndarray:
    """QKV as the C++ example makes it."""
    shape = ROWS, CONFIG["num_qo_heads"] + 2 * CONFIG["num_kv_heads"], CONFIG["qk_head_dim"]
    numbers = np.arange(np.prod(shape), dtype=np.int64) * 7919 % 1009
    return (numbers.astype("float32") / np.float32(512) - np.float32(1)).reshape(shape)


def expected() -> np.ndarray:
    cache = reference.ReferenceCache(2, np.float32, Rope(1e4, 1.0, 32, SCALING), "normal")
    cache.add_sequence(SEQUENCE)
    return cache.attention(0, [SEQUENCE], [ROWS], inputs(), 2, CONFIG["qk_head_dim"] ** -0.5)[0]


def rewrite(folder: Path, change) -> None:
    """Change the manifest as one who knows how, its digest too."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.sha256").write_text(f"{digest}  manifest.json\n")


def refused(folder: Path, text: str) -> None:
    """Both loaders, that of C++ programs and Python's, refuse the folder."""
    with pytest.raises(ValueError, match=text):
        tvm_ffi.get_global_func("pagedkv.load_bundle")(str(folder), None, None)
    with pytest.raises(ValueError, match=text):
        pkv.load_bundle(folder)
