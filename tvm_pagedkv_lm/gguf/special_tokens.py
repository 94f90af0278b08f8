# SPDX-License-Identifier: Apache-2.0
"""Special tokens in the metadata of a GGUF file: their types and ids, and which of them end a text.

Files leave out much of it, so published names and SentencePiece's ids count as well.
"""

from __future__ import annotations

from .metadata import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
_ABSENT = (-1, 2**32 - 1)  # what files have for a token that there is none of
# Ids of models of kind "llama" whose files do not name them.
_SENTENCE_PIECE = {"unknown": (0, "<unk>"), "bos": (1, "<s>"), "eos": (2, "</s>")}
_NAMES = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator")

# Special tokens that end a turn or a text, whether or not the file names them as such.
_ENDS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|EOT|>", "<|end|>", "<|return|>",
    "<|call|>", "<|calls|>", "<|flush|>", "<|endoftext|>", "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>", "[|endofturn|]", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|tool_response>", "<eos>", "</s>",
    "<EOT>", "[EOS]", "[EOT]",
})  # fmt: skip
_TAG = "</s>"  # to Gemma, which has it as a token of its own, a tag of HTML
# Where a turn has several messages, which these end as well, this token ends a message only.
_END_OF_MESSAGE, _ENDS_OF_TURNS = "<|end|>", ("<|call|>", "<|calls|>")


def token_types(metadata: Metadata) -> list[int]:
    """Return the type of each token.

    End tokens in bars, such as ``<|im_end|>``, are control tokens, whatever the file says: no text
    has them. So are the tokens that keys name, in a file without types.

    Raises
    ------
    ValueError
        If the file has not a type for each token.
    """
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    types = metadata.get("tokenizer.ggml.token_type", list, None)
    if types is None:
        types = [NORMAL] * len(tokens)
        named = {name: token_id(metadata, name) for name in _NAMES}
        for name, token in named.items():
            if token is not None and 0 <= token < len(tokens):
                types[token] = UNKNOWN if name == "unknown" else CONTROL
    if len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.token_type has {len(types)} values for {len(tokens)} tokens"
        )
    barred = {token for token in _ENDS if token[:2] in ("<|", "<\uff5c") and token[-2] in "|\uff5c"}
    return [
        CONTROL if kind == NORMAL and token in barred else kind
        for token, kind in zip(tokens, types, strict=True)
    ]


def token_id(metadata: Metadata, name: str) -> int | None:
    """Return the id of a special token, such as "bos"; None if the model has none."""
    token = metadata.get(f"tokenizer.ggml.{name}_token_id", int, None)
    if token is None and name in _SENTENCE_PIECE:
        index, text = _SENTENCE_PIECE[name]
        tokens = metadata.get("tokenizer.ggml.tokens", list)
        is_theirs = metadata.get("tokenizer.ggml.model", str, None) == "llama"
        return index if is_theirs and tokens[index : index + 1] == [text] else None
    return None if token in _ABSENT else token


def token_text(metadata: Metadata, name: str, token: int) -> str:
    """Return a special token.

    Raises
    ------
    ValueError
        If it is not in the vocabulary; the message names its key.
    """
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    if not 0 <= token < len(tokens):
        raise ValueError(
            f"tokenizer.ggml.{name}_token_id {token} is not in the vocabulary of {len(tokens)}"
        )
    return tokens[token]


def end_tokens(metadata: Metadata) -> list[int]:
    """Return the ids of all tokens that end a text."""
    tokens, types = metadata.get("tokenizer.ggml.tokens", list), token_types(metadata)
    ids = [token_id(metadata, name) for name in ("eos", "eot", "eom")]
    ids += metadata.get("tokenizer.ggml.eos_token_ids", list, [])
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if token in _ENDS and (kind == CONTROL or kind == USER_DEFINED and token != _TAG):
            ids.append(i)
    found = [*dict.fromkeys(i for i in ids if i is not None and i not in _ABSENT)]
    texts = {token_text(metadata, "eos", i): i for i in found}
    if _END_OF_MESSAGE in texts and any(token in texts for token in _ENDS_OF_TURNS):
        found.remove(texts[_END_OF_MESSAGE])
    return found


def named_tokens(metadata: Metadata) -> dict[str, str]:
    """Return special tokens by their names in chat templates, such as "bos_token".

    Raises
    ------
    ValueError
        If BOS or EOS is not in the vocabulary; others are left out then, as no text has them.
    """
    num_tokens = len(metadata.get("tokenizer.ggml.tokens", list))
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"}
    found = {}
    for theirs, ours in names.items():
        token = token_id(metadata, theirs)
        if token is not None and (theirs in ("bos", "eos") or 0 <= token < num_tokens):
            found[f"{ours}_token"] = token_text(metadata, theirs, token)
    return found
