# SPDX-License-Identifier: Apache-2.0
"""Chats in which control tokens within messages are text, so that no message forges a turn.

Templates put messages between control tokens, and a tokenizer does not know who wrote which part of
the text. So control tokens in messages are replaced by placeholders before the template is
rendered, and those that the template writes are given other names after it. A copy of the tokenizer
knows them by these names only; to it, the old ones are text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .chat import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Names that no message has, for nobody can guess them.
_SECRET = secrets.token_hex(8)
_PLACEHOLDER = f"\ue000{_SECRET}:{{}}\ue001"
_NAME = f"\ue002{_SECRET}:{{}}\ue003"
_PLACEHOLDERS = re.compile(_PLACEHOLDER.format(r"(\d+)"))


def encode_plain(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    **variables: Any,
) -> list[int]:
    """Return the token ids of a conversation whose messages have no control tokens.

    Control tokens are the special tokens, and others that the template has, such as
    ``<tool_call>``. In answers of the model, only special tokens become text, for templates look
    for others there, such as ``</think>``.

    Raises
    ------
    ValueError, RuntimeError
        As `ChatTemplate.render`; ValueError also if the tokenizer makes a control token of parts.
    """
    special, control = _control_tokens(tokenizer, template.source)
    ids = {token: index for index, token in enumerate(control)}

    def hide(value: Any, tokens: tuple[str, ...]) -> Any:
        if isinstance(value, str):
            return _pattern(tokens).sub(lambda m: _PLACEHOLDER.format(ids[m[0]]), value)
        if isinstance(value, Mapping):
            return {name: hide(each, tokens) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [hide(each, tokens) for each in value]
        return value

    def is_answer(message: Any) -> bool:
        return isinstance(message, Mapping) and message.get("role") == "assistant"

    hidden = [hide(each, special if is_answer(each) else control) for each in messages]
    text = template.render(hidden, tools=hide(tools, control), **hide(variables, control))
    text = _pattern(control).sub(lambda m: _NAME.format(ids[m[0]]), text)
    text = _PLACEHOLDERS.sub(lambda m: control[int(m[1])], text)
    return plain_tokenizer(tokenizer, template.source).encode(text, add_special_tokens=False).ids


@lru_cache(maxsize=1)
def plain_tokenizer(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """Return a copy of a tokenizer to which control tokens are text.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    template : str
        The source of the chat template, which has control tokens; empty without one.

    Raises
    ------
    ValueError
        If the tokenizer makes a control token of parts.
    """
    from tokenizers import Tokenizer

    _, control = _control_tokens(tokenizer, template)
    names = {token: _NAME.format(index) for index, token in enumerate(control)}
    fields = json.loads(tokenizer.to_str())
    for token in fields["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = fields["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): i for token, i in vocabulary.items()}
    else:  # of Unigram, with scores
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    try:
        copy = Tokenizer.from_str(json.dumps(fields))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"control tokens of this tokenizer cannot be text: {error}") from None
    for token, name in names.items():
        if copy.token_to_id(name) != tokenizer.token_to_id(token):
            raise ValueError(f"the control token {token!r} of this tokenizer cannot be text")
    return copy


@lru_cache(maxsize=1)
def _control_tokens(tokenizer: Tokenizer, template: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the special tokens, and these with the others that a template has."""
    added = tokenizer.get_added_tokens_decoder().values()
    special = [each.content for each in added if each.special]
    others = [
        each.content
        for each in added
        if not each.special and each.content in template and not each.content.isspace()
    ]
    return tuple(special), tuple([*special, *others])


@lru_cache(maxsize=2)
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of any of the tokens; of two, the longer one counts."""
    longest = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")
