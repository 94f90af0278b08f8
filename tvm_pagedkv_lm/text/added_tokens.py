# SPDX-License-Identifier: Apache-2.0
"""Tokens that files beside ``tokenizer.json`` name, with the ids that transformers gives them.

``tokenizer_config.json`` may list tokens that tokenizer.json lacks; folders of older versions name
them in ``special_tokens_map.json`` and ``added_tokens.json``, which count only without such a list.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.json_files import read_json

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FILES = (CONFIG, MAP, ADDED)
_LIST = "added_tokens_decoder"  # id -> token
NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def token_fields(directory: Path) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json, and those of special_tokens_map.json that count.

    Raises
    ------
    ValueError
        If a file is damaged.
    """
    fields = _read(directory / CONFIG)
    return fields if _LIST in fields else fields | _read(directory / MAP)


def special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return special tokens by their names in chat templates, such as "bos_token"."""
    found = {name: _content(fields.get(name)) for name in NAMES}
    return {name: text for name, text in found.items() if text is not None}


def add_named_tokens(tokenizer: Tokenizer, directory: Path) -> None:
    """Add the tokens to a tokenizer that its directory names and that it does not have.

    New ones get the next ids, in the order of the ids that the files give them.

    Raises
    ------
    ValueError
        If a file is damaged; the message names it.
    """
    fields = token_fields(directory)
    where = directory / CONFIG
    named = dict(_named(fields))
    special = {_content(value) for value in named.values()}
    listed = _listed(fields, where) if _LIST in fields else _of_older_files(directory, fields)
    known = {each.content for each in tokenizer.get_added_tokens_decoder().values()}
    new: dict[str, AddedToken] = {}
    for _, token in sorted(listed.items()):
        new[token.content] = token
    for value in (*named.values(), *_extra(fields)):
        token = _added_token(value, where)
        if token.content not in known:
            new.setdefault(token.content, token)
    for token in new.values():
        token.special = token.special or token.content in special
    tokenizer.add_tokens([*new.values()])
    for index, token in listed.items():
        found = tokenizer.token_to_id(token.content)
        if found != index:
            warnings.warn(
                f"{directory}: token {token.content!r} has the id {found}, as in transformers; "
                f"the file that names it says {index}",
                UserWarning,
                stacklevel=2,
            )


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _content(value: Any) -> str | None:
    """Return the text of a token, which a file has as text or as an object with its content."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None


def _named(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tokens that have a name; of the model's own names, those with flags come first."""
    others = [name for name in fields if name.endswith("_token") and name not in NAMES]
    others.sort(key=lambda name: isinstance(fields[name], str))
    for name in (*NAMES, *others):
        if _content(fields.get(name)) is not None:
            yield name, fields[name]
    extra = fields.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        yield from extra.items()


def _extra(fields: Mapping[str, Any]) -> list[Any]:
    """Return the tokens that are special, but have no name."""
    extra = fields.get("extra_special_tokens") or fields.get("additional_special_tokens")
    return extra if isinstance(extra, list) else []


def _listed(fields: Mapping[str, Any], where: Path) -> dict[int, AddedToken]:
    found = {}
    tokens = fields[_LIST]
    if not isinstance(tokens, Mapping):
        raise ValueError(f"{where}: {_LIST} must be an object, got {tokens!r:.80}")
    for index, token in tokens.items():
        if not index.isdecimal() or not isinstance(token, Mapping):
            raise ValueError(f"{where}: {_LIST} must have tokens by their ids, got {index!r}")
        found[int(index)] = _added_token(token, where, is_special=False)
    return found


def _of_older_files(directory: Path, fields: Mapping[str, Any]) -> dict[int, AddedToken]:
    from tokenizers import AddedToken

    special = {_content(fields.get(name)) for name in NAMES} | {*map(_content, _extra(fields))}
    found = {}
    for text, index in _read(directory / ADDED).items():
        if isinstance(index, bool) or not isinstance(index, int):
            raise ValueError(f"{directory / ADDED}: token {text!r} must have an id, got {index!r}")
        is_special = text in special
        found[index] = AddedToken(text, normalized=not is_special, special=is_special)
    return found


def _added_token(value: Any, where: Path, is_special: bool = True) -> AddedToken:
    """Return a token; `is_special` counts where its file does not say."""
    from tokenizers import AddedToken

    text = _content(value)
    if not text:
        raise ValueError(f"{where}: a token must be a text or an object with one, got {value!r}")
    if isinstance(value, str):
        return AddedToken(text, special=is_special)
    flags = {name: bool(value[name]) for name in _FLAGS if value.get(name) is not None}
    return AddedToken(text, **{"special": is_special} | flags)
