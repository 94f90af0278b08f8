# SPDX-License-Identifier: Apache-2.0
"""`export_model`: a model as a folder that a C++ program runs without Python."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tvm.contrib import tvmjs

from tvm_pagedkv.bundle import write_bundle

from .caches import cache_config
from .model import DecoderModel

MODEL, WEIGHTS, ABOUT = "model.so", "weights", "model.json"


def export_model(
    model: str | Path | None,
    path: str | Path,
    dtype: str | None = None,
    *,
    page_size: int = 16,
    kv_dtype: str | None = None,
    state_dtype: str = "float32",
    kv_scales: str = "row",
    weights: str = "auto",
    target: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write a folder with a compiled model, its weights and the libraries that run them.

    The folder is a bundle of the cache's kernels, which also has ``model.so`` (the functions of
    `decoder.Decoder`), ``weights/`` (as TVM's tensor cache, named ``weight_0``, ``weight_1``, ...),
    ``model.json`` (its ``vocab_size``, ``dtype``, ``eos_token_ids``, the ``longest_text`` that it
    reaches or null, and a ``content_digest`` for the names of stored pages) and ``tokenizer.json``.
    ``runtime_ext/example/run_model.cc`` runs it.

    Parameters
    ----------
    model, dtype, page_size, kv_dtype, state_dtype, kv_scales, weights
        As `DecoderModel.from_pretrained` takes them.
    path : str or Path
        A folder that does not exist, or is empty.
    target : str, optional
        The CPU that the code is for, such as "x86-64-v3"; None: this machine's.
    progress : callable, optional
        Called with a line of text when something takes time.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ValueError, RuntimeError
        As `write_bundle` and `DecoderModel.from_pretrained`.
    FileNotFoundError
        Where the model or one of its files is missing.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"a model needs a folder of its own, and {path} is not empty")
    loaded = DecoderModel.from_pretrained(
        model,
        dtype,
        page_size=page_size,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        kv_scales=kv_scales,
        weights=weights,
        target=target,
        progress=progress,
    )
    config = cache_config(loaded.config, loaded.options)
    write_bundle(config, path, [loaded.options.target], progress=progress)
    shutil.copyfile(loaded.library, path / MODEL)
    named = {f"weight_{i}": weight for i, weight in enumerate(loaded.parameters)}
    with contextlib.redirect_stdout(None):  # it tells how many files it wrote
        tvmjs.dump_tensor_cache(
            named, str(path / WEIGHTS), encode_format="raw", show_progress=False
        )
    loaded.tokenizer.save(str(path / "tokenizer.json"))
    about = {
        "vocab_size": loaded.config.vocab_size,
        "dtype": loaded.options.dtype,
        "eos_token_ids": list(loaded.config.eos_token_ids),
        "longest_text": loaded.config.longest_text,
        "content_digest": loaded.content_digest,
    }
    (path / ABOUT).write_text(json.dumps(about, indent=1) + "\n")  # last: the folder is whole
    return path
