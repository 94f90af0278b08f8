# SPDX-License-Identifier: Apache-2.0
"""Models by name: paths, included models, and ids of the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from ..weights.weight_files import ADAPTER
from . import included

# A file directly below a folder, such as models/a.gguf, is a path.
_HUB_ID = re.compile(r"\w[\w.-]*/(?![^/]+\.gguf$)\w[\w.-]*(/[\w./-]+\.gguf)?", re.ASCII)
_FILES = ["*.json", "*.safetensors", "*.jinja", "tiktoken.model"]
# The same weights again, in folders or in Mistral's format, and what is no weights of the model.
_OTHERS = ["*/*", "consolidated*", "adapter_model.safetensors", "optimizer.safetensors"]


def find_model(model: str | Path) -> Path:
    """Return the path of a model, which is downloaded if it is an id of the Hub.

    Parameters
    ----------
    model : str or Path
        A path; "tiny" or "smollm2"; or an id such as "org/name", or "org/name/file.gguf". A path
        that exists takes precedence.

    Raises
    ------
    FileNotFoundError
        If the model cannot be had; the message says how to get it.
    """
    path, name = Path(model), str(model)
    if path.exists():
        return path
    if name in included.NAMES:
        folder = included.find_included(name)
        if folder is None:
            raise FileNotFoundError(
                f"{name} was not downloaded yet; run: tvm-pagedkv download {name}"
            )
        return folder
    if isinstance(model, str) and (found := _HUB_ID.fullmatch(name)):
        return _download(name, file=found[1])
    return path


def _download(name: str, file: str | None) -> Path:
    """Return the folder or the file of a Hub id, from the Hub or from its cache."""
    repository = "/".join(name.split("/")[:2])
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{error.name} is not installed; install what the Hub needs with: "
            "pip install 'tvm-pagedkv[demo]'"
        ) from None
    try:
        if file is not None:
            return Path(hf_hub_download(repository, file.lstrip("/")))
        folder = Path(snapshot_download(repository, allow_patterns=_FILES, ignore_patterns=_OTHERS))
    except Exception as error:  # of the Hub's client, its HTTP library or the disk
        raise FileNotFoundError(
            f"there is no file or folder {name}, and the model {repository} cannot be downloaded "
            f"from the Hugging Face Hub. Without a network, run `hf download {repository} "
            "--local-dir DIR` on a machine that has one, copy DIR here, and name it as the model"
        ) from error
    has_adapter = (folder / ADAPTER).is_file()  # the error about it names its base model
    if not (has_adapter or (folder / "config.json").is_file()):
        raise FileNotFoundError(
            f"{repository} on the Hub has no config.json; to run one of its GGUF files, name it as "
            f"{repository}/FILE.gguf"
        )
    return folder
