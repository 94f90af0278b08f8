# SPDX-License-Identifier: Apache-2.0
"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..text.byte_level import byte_level_bpe, merges_of
from ..text.splitters import SPLITTERS
from .metadata import Metadata
from .special_tokens import CONTROL, UNKNOWN, USER_DEFINED, token_id, token_text, token_types

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "\u2581"  # what stands for a space in SentencePiece's tokens
# Splitters of the first files, which do not name them, by architecture.
_UNNAMED_SPLITTERS = {"llama": "llama-bpe", "qwen2": "qwen2"}


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Return the tokenizer.

    Raises
    ------
    ValueError
        If its kind is not supported; the message names the key.
    """
    from tokenizers import AddedToken

    tokens, types = metadata.get("tokenizer.ggml.tokens", list), token_types(metadata)
    kind = metadata.get("tokenizer.ggml.model", str)
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, tokens)
    elif kind in ("llama", "gemma4"):
        tokenizer, adds_bos = _sentence_piece(metadata, tokens, types, kind == "gemma4")
    else:
        raise ValueError(
            f"tokenizer.ggml.model {kind!r} is not supported; expected gpt2, llama or gemma4"
        )
    # Phi-3's templates put a line after such a token that the model never saw.
    strips = kind == "llama" and metadata.architecture == "phi3"
    for type_id, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(
                token,
                special=is_special,
                normalized=False,
                rstrip=strips and token not in ("<s>", "<unk>", "<|endoftext|>"),
            )
            for token, each in zip(tokens, types, strict=True)
            if each == type_id
        ]
        tokenizer.add_special_tokens(added) if is_special else tokenizer.add_tokens(added)
    _add_bos_and_eos(tokenizer, metadata, adds_bos)
    return tokenizer


# --- kinds --------------------------------------------------------------------------------------


def _byte_level(metadata: Metadata, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return the BPE of bytes that GPT-2 began, and whether it puts BOS first by default."""
    name = metadata.get("tokenizer.ggml.pre", str, None)
    if name is None:
        name = _UNNAMED_SPLITTERS.get(metadata.architecture, "default")
        warnings.warn(
            f"the file lacks the key tokenizer.ggml.pre; {name!r} is assumed, and tokens are wrong "
            "if its texts were split in another way",
            stacklevel=2,
        )
    if name not in SPLITTERS:
        raise ValueError(
            f"tokenizer.ggml.pre {name!r} is not supported; expected one of {', '.join(SPLITTERS)}"
        )
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", list)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    splitter = SPLITTERS[name]
    return byte_level_bpe(vocabulary, merges, splitter), splitter.adds_bos


def _pair(merge: Any) -> tuple[str, str]:
    left, _, right = str(merge).partition(" ")
    if not (left and right):
        raise ValueError(f"tokenizer.ggml.merges has {merge!r}; expected two tokens and a space")
    return left, right


def _sentence_piece(
    metadata: Metadata, tokens: list[str], types: Sequence[int], has_merges: bool
) -> tuple[Tokenizer, bool]:
    """Return SentencePiece's BPE, which puts BOS first.

    Its merges follow from the scores, if the file has none.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: i for i, token in enumerate(tokens)}
    if has_merges:
        merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", list)]
    else:
        scores = metadata.get("tokenizer.ggml.scores", list)
        if len(scores) != len(tokens):
            raise ValueError(
                f"tokenizer.ggml.scores has {len(scores)} values, expected {len(tokens)}"
            )
        merges = merges_of(vocabulary, scores)
    unknown = next((t for t, each in zip(tokens, types, strict=True) if each == UNKNOWN), None)
    bpe = models.BPE(
        vocab=vocabulary,
        merges=merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", bool, not has_merges)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _add_bos_and_eos(tokenizer: Tokenizer, metadata: Metadata, adds_bos: bool) -> None:
    """Let the tokenizer put BOS before a text and EOS after it, if the file asks for them."""
    from tokenizers.processors import TemplateProcessing

    pieces, used = ["$A"], []
    for name, default in (("bos", adds_bos), ("eos", False)):
        token = token_id(metadata, name)
        is_added = metadata.get(f"tokenizer.ggml.add_{name}_token", bool, default)
        if name == "bos" and metadata.get("tokenizer.ggml.model", str) == "gemma4":
            is_added = True  # the models expect it; their first files say that they do not
        if is_added and token is not None:
            used.append((token_text(metadata, name, token), token))
            pieces.insert(0 if name == "bos" else len(pieces), used[-1][0])
    if used:
        tokenizer.post_processor = TemplateProcessing(single=pieces, special_tokens=used)
