# SPDX-License-Identifier: Apache-2.0
"""Conversations in files: the messages as JSON, and a checkpoint of the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tvm_pagedkv import CacheFullError

from ..text.tokens import check_tokens
from .conversation import Conversation

FORMAT = "tvm-pagedkv conversation"
VERSION = 2


def save_session(
    conversation: Conversation,
    path: str | os.PathLike,
    *,
    model: str | None = None,
    checkpoint: str | os.PathLike | None = None,
) -> None:
    """Write a conversation to a file, for `load_session`.

    Only the owner can read the files. An older one is replaced when the new one is complete.

    Parameters
    ----------
    conversation : Conversation
    path : path
        Of the JSON file.
    model : str, optional
        A name for the model; None: its fingerprint.
    checkpoint : path, optional
        Where to write the pages of the conversation as well.

    Raises
    ------
    OSError
        If a file cannot be written.
    """
    fields: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": _model_name(conversation, model),
        "system": conversation.system,
        "messages": conversation.messages,
        "tokens": conversation.tokens,
    }
    if checkpoint is not None:
        num_tokens = _save_pages(conversation, checkpoint)
        fields["checkpoint"] = {
            "precision": _precision(conversation),
            "num_tokens": num_tokens,
            "header": _header_digest(checkpoint),
        }
    lines = [f'"{name}": {json.dumps(fields[name], ensure_ascii=False)}' for name in fields]
    _write(Path(path), "{\n" + ",\n".join(lines) + "\n}\n")


def load_session(
    conversation: Conversation,
    path: str | os.PathLike,
    *,
    model: str | None = None,
    checkpoint: str | os.PathLike | None = None,
) -> str | None:
    """Continue a conversation from a file.

    Parameters
    ----------
    conversation : Conversation
        Its turns are replaced, and so is its system message.
    path, model, checkpoint
        As for `save_session`.

    Returns
    -------
    str or None
        Why the checkpoint was not used; the next answer then computes the conversation anew. None:
        it was used, or none was asked for.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it has no conversation, or one with another model. The conversation is as it was.
    """
    fields = _read(Path(path), conversation, _model_name(conversation, model))
    conversation.system, conversation.messages = fields["system"], fields["messages"]
    conversation.tokens = fields["tokens"]
    if checkpoint is None:
        return None
    try:
        _load_pages(conversation, checkpoint, fields.get("checkpoint"))
    except (OSError, ValueError, KeyError, CacheFullError) as error:
        text = error.strerror if isinstance(error, OSError) else str(error)
        return f"{checkpoint} is not used: {text}"
    return None


def _read(path: Path, conversation: Conversation, model: str) -> dict[str, Any]:
    """Return the fields of a session; raise a ValueError if they are invalid."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:  # of UTF-8 or JSON
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError(f"{path} has no conversation")
    if fields.get("version") != VERSION:
        raise ValueError(f"{path} has version {fields.get('version')!r}, expected {VERSION}")
    if fields.get("model") != model:
        raise ValueError(
            f"{path} is of a conversation with another model: its weights, tokenizer or chat "
            "template differ"
        )
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(
        isinstance(each, dict)
        and each.keys() - {"thinking"} == {"role", "content"}
        and each["role"] == ("user", "assistant")[index % 2]
        and isinstance(each["content"], str)
        and isinstance(each.get("thinking", ""), str)
        for index, each in enumerate(messages)
    ):
        raise ValueError(f"{path}: messages must be of user and assistant in turn")
    if len(messages) % 2:
        raise ValueError(f"{path}: the last message has no answer")
    system = fields.get("system")
    if not (system is None or isinstance(system, str)):
        raise ValueError(f"{path}: system must be a text, got {system!r:.80}")
    if system is not None and conversation.model.chat_template is None:
        raise ValueError(f"{path} has a system message, and the model has no chat template")
    tokens = fields.get("tokens")
    if not isinstance(tokens, list):
        raise ValueError(f"{path}: tokens must be a list")
    try:
        vocab_size = conversation.model.config.vocab_size
        fields["tokens"] = check_tokens("tokens", tokens, vocab_size).tolist()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return fields


# --- pages --------------------------------------------------------------------------------------


def _model_name(conversation: Conversation, model: str | None) -> str:
    """Return the name of the model in a session."""
    return getattr(conversation.model, "fingerprint", "") if model is None else model


def _precision(conversation: Conversation) -> str:
    """Return a name for what K and V depend on besides the model, the layout and the tokens."""
    options = conversation.model.options
    rope_factors = "long" if conversation.has_long_texts else "short"
    return f"{options.precision} {rope_factors}"


def _save_pages(conversation: Conversation, path: str | os.PathLike) -> int:
    """Write the pages that the cache still has; return the number of their positions."""
    cache = conversation.cache
    # The last token is never found, so there is one more.
    num_tokens = cache.add_sequence(0, [*conversation.tokens, 0])
    try:
        cache.save(path, [0])
    finally:
        cache.remove_sequence(0)
    return num_tokens


def _load_pages(conversation: Conversation, path: str | os.PathLike, about: Any) -> None:
    """Let the cache find the pages of a file; raise a ValueError if they are of something else."""
    if not isinstance(about, dict) or about.get("header") != _header_digest(path):
        raise ValueError("it was not written with this session")
    if about.get("precision") != _precision(conversation):
        raise ValueError("it is of a model in other types, or with other factors of its rotation")
    num_tokens, cache = about.get("num_tokens"), conversation.cache
    if type(num_tokens) is not int or not 0 <= num_tokens <= len(conversation.tokens):
        raise ValueError("the session does not have its tokens")
    (seq_id,) = cache.load(path, {0: 0})
    try:
        if cache.sequence_length(seq_id) != num_tokens:
            raise ValueError("the session does not have its tokens")
        cache.record_tokens(seq_id, conversation.tokens[:num_tokens])
    finally:
        cache.remove_sequence(seq_id)


def _header_digest(path: str | os.PathLike) -> str:
    """Return a digest of a checkpoint's header, which has a checksum of each layer's pages."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > 2**30:
            raise ValueError("it is not a checkpoint")
        return hashlib.sha256(file.read(size)).hexdigest()


def _write(path: Path, text: str) -> None:
    """Replace a file when the new one is complete."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
