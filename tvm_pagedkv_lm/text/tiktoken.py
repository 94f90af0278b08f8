# SPDX-License-Identifier: Apache-2.0
"""The tokenizer in ``tiktoken.model``, in which Kimi's models have it.

The file lists the bytes of each token in base64 with a rank, which is also the token's id. BPE
merges the pair whose token has the lowest rank.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.json_files import read_json
from .byte_level import byte_characters, byte_level_bpe, merges_of
from .splitters import SPLITTERS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tiktoken.model"
_CLASS = "TikTokenTokenizer"  # of Kimi, whose code says how texts are split
_NUM_SPECIAL = 256  # tokens behind those of the file; the unnamed ones are reserved


def tiktoken_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer of a directory with `FILE`.

    Raises
    ------
    ValueError
        If the file is damaged, or tokenizer_config.json is not Kimi's.
    """
    from tokenizers import AddedToken

    file = directory / "tokenizer_config.json"
    fields = read_json(file) if file.is_file() else {}
    if fields.get("tokenizer_class") != _CLASS:
        raise ValueError(
            f"{file}: tokenizer_class must be {_CLASS!r}, as in Kimi's models, for {FILE} to be "
            f"read, got {fields.get('tokenizer_class')!r}"
        )
    vocabulary = _vocabulary(directory / FILE)
    merges = merges_of(vocabulary, [-rank for rank in range(len(vocabulary))])
    tokenizer = byte_level_bpe(vocabulary, merges, SPLITTERS["kimi-k2"])
    named = fields.get("added_tokens_decoder") or {}
    for index in range(len(vocabulary), len(vocabulary) + _NUM_SPECIAL):
        token = named.get(str(index), {"content": f"<|reserved_token_{index}|>"})
        _add(tokenizer, AddedToken, token)
    return tokenizer


def _add(tokenizer: Tokenizer, added_token: Any, token: Mapping[str, Any]) -> None:
    """Add the next token; texts of prompts may have it whether or not it is special."""
    is_special = bool(token.get("special", True))
    added = added_token(token["content"], special=is_special, normalized=False)
    tokenizer.add_special_tokens([added]) if is_special else tokenizer.add_tokens([added])


def _vocabulary(file: Path) -> dict[str, int]:
    """Return the tokens of a file, with a character for each byte, and their ranks."""
    characters = byte_characters()
    found: dict[str, int] = {}
    for line in file.read_bytes().splitlines():
        try:
            token, rank = line.split()
            text = "".join(characters[byte] for byte in base64.b64decode(token, validate=True))
            found[text] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(
                f"{file}: expected base64 and a rank in a line, got {line!r}"
            ) from None
    if sorted(found.values()) != [*range(len(found))] or not found.keys() >= {*characters}:
        raise ValueError(f"{file} must have all bytes, and ranks from 0 on without gaps")
    return dict(sorted(found.items(), key=lambda item: item[1]))
