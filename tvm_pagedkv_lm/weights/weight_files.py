# SPDX-License-Identifier: Apache-2.0
"""Which files of a Hugging Face directory have the weights of its model."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

from ..config.json_files import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # of PEFT
_FOREIGN = "params.json"  # of Mistral and Meta
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_MAX_HEADER_BYTES = 100_000_000  # as the library has it
_PICKLED = ("pytorch_model*.bin", "consolidated*.pth", "model*.bin", "*.pt")


def weight_files(directory: Path) -> list[str]:
    """Return the names of the files that have the weights.

    They are those that transformers reads: the file that ``transformers_weights`` of config.json
    names, else ``model.safetensors``, else the shards that ``model.safetensors.index.json`` names.
    Without these, all shards of one set are read as well, or the only file there is. Other
    ``*.safetensors``, such as averages, states of optimizers, adapters or the same weights in
    another format, are not.

    Parameters
    ----------
    directory : Path
        The model's directory.

    Returns
    -------
    list of str
        Empty if the directory has no such files. The files need not exist.

    Raises
    ------
    ValueError
        If an index is damaged, or names files in other folders.
    """
    chosen = _named_by_config(directory)
    if chosen is not None:
        return _shards(directory / chosen) if chosen.endswith(".json") else [chosen]
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    if WEIGHTS in names:
        found = [WEIGHTS]
    elif INDEX in names:
        found = _shards(directory / INDEX)
    else:
        found = _shards_without_index(names)
    if found and ADAPTER in names:
        warnings.warn(
            f"{directory} has the weights of a model beside a PEFT adapter, which is not applied",
            UserWarning,
            stacklevel=2,
        )
    return found


def tensor_begins(file: Path) -> list[int]:
    """Return the offsets in a safetensors file at which its tensors begin.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If its header is damaged.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = stream.read(size) if size <= _MAX_HEADER_BYTES else b""
    try:
        tensors = json.loads(header)
        return [
            8 + size + int(info["data_offsets"][0])
            for name, info in tensors.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ValueError(f"{file} is not a readable safetensors file") from None


def why_no_weights(directory: Path) -> str:
    """Return a sentence that says why a directory has no weights, and what to do."""
    expected = f"expected {WEIGHTS}, or {INDEX} and its shards"
    names = sorted(path.name for path in directory.iterdir())
    if ADAPTER in names:
        base = read_json(directory / ADAPTER).get("base_model_name_or_path")
        of = f" of {base}" if base else ""
        return (
            f"{directory} is a PEFT adapter{of}, not a model; merge both with peft "
            "(merge_and_unload, then save_pretrained) and name the folder of the result"
        )
    if _FOREIGN in names and any(name.startswith("consolidated") for name in names):
        return (
            f"{directory} has the weights in Mistral's or Meta's own format (params.json, "
            f"consolidated.*), which is not read; {expected}, as transformers writes them"
        )
    pickled = sorted({path.name for kind in _PICKLED for path in directory.glob(kind)})
    if pickled:
        return (
            f"{directory} has its weights as pickled PyTorch tensors ({_list(pickled)}), which may "
            f"run code and are not read; {expected}: load them with transformers and write them "
            "with save_pretrained"
        )
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        return f"{directory} has no weights by their usual names; {expected}, got {_list(others)}"
    folders = sorted(path.parent.name for path in directory.glob(f"*/{WEIGHTS}*"))
    if folders:
        return f"{directory} has no tensors; {expected}; its folder {folders[-1]} has some"
    return f"{directory} has no tensors; {expected}"


def _named_by_config(directory: Path) -> str | None:
    """Return the file that config.json names, as transformers 5 takes it; None if it names none."""
    file = directory / "config.json"
    name = read_json(file).get("transformers_weights") if file.is_file() else None
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"{file}: transformers_weights must be the name of a file, got {name!r}")
    if not name.endswith((".safetensors", ".safetensors.index.json")):
        raise ValueError(
            f"{file}: transformers_weights must be a .safetensors file or the index of several, "
            f"got {name!r}"
        )
    return name


def _shards(index: Path) -> list[str]:
    """Return the file names in an index, which must be in the same folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: tensor {name} is in {file!r}; expected the name of a file")
    return sorted(set(weight_map.values()))


def _shards_without_index(names: set[str]) -> list[str]:
    """Return the only file of a folder, or all shards of its only set, which need not exist."""
    files = [name for name in names if name.endswith(".safetensors")]
    if not names & {ADAPTER, _FOREIGN} and len(files) == 1 and not _SHARD.fullmatch(files[0]):
        return files
    counts = {int(match[2]) for name in files if (match := _SHARD.fullmatch(name))}
    if len(counts) != 1:  # of two sets, no index says which counts
        return []
    (count,) = counts
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def _list(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
