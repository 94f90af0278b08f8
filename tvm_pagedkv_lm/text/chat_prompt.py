# SPDX-License-Identifier: Apache-2.0
"""`encode_chat`: the token ids of a conversation that a model is to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .plain_messages import encode_plain


def encode_chat(
    model,
    messages: Sequence[Mapping[str, Any]],
    *,
    plain_messages: bool = False,
    **variables: Any,
) -> list[int]:
    """Token ids of a conversation that the model is to answer: a prompt of `generation.generate`.

    Parameters
    ----------
    model : DecoderModel or ParallelModel
    messages, **variables
        As `ChatTemplate.render` takes them.
    plain_messages : bool
        Whether control tokens in messages and tools, such as ``<|im_end|>``, are text. By default
        they are control tokens, as in transformers, so a message can forge a turn.

    Raises
    ------
    ValueError
        For a model without a template, as of `ChatTemplate.render`, and if control tokens cannot be
        text, because the tokenizer makes them of parts.
    """
    if model.chat_template is None:
        raise ValueError(
            "the model has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json), so it can only continue texts"
        )
    if plain_messages:
        tools = variables.pop("tools", None)
        return encode_plain(model.tokenizer, model.chat_template, messages, tools, **variables)
    text = model.chat_template.render(messages, **variables)
    return model.tokenizer.encode(text, add_special_tokens=False).ids
