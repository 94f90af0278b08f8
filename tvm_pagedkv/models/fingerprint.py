# SPDX-License-Identifier: Apache-2.0
"""`fingerprint`: a name for the weights of a Hugging Face directory."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .model import TINY


def fingerprint(directory: str | Path | None = None) -> str:
    """Return a name for a model, to tell whether K and V of an earlier process are its own.

    It depends on the content of config.json and tokenizer.json, and on the names, sizes and
    modification times of the weights, which are too large to be read for this.

    Parameters
    ----------
    directory : path, optional
        A Hugging Face directory; None: the small model in this package.

    Returns
    -------
    str
        64 hexadecimal digits.

    Raises
    ------
    OSError
        If a file cannot be read.
    """
    directory = TINY if directory is None else Path(directory)
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        digest.update((directory / name).read_bytes() + b"\0")
    for file in sorted(directory.glob("*.safetensors*")):
        info = file.stat()
        digest.update(f"{file.name} {info.st_size} {info.st_mtime_ns}\n".encode())
    return digest.hexdigest()
