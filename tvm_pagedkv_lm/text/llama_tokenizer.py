# SPDX-License-Identifier: Apache-2.0
"""Where tokenizers of Llama 1 and 2 put a space that is not in the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_SPACE = "\u2581"  # what stands for a space in SentencePiece's tokens


def set_prefix_space(tokenizer: Tokenizer, fields: Mapping[str, Any], model_type: Any) -> None:
    """Let a tokenizer put a space where transformers puts one.

    Its ``LlamaTokenizer`` takes only the vocabulary and the merges of tokenizer.json. A space comes
    before the text, and with ``legacy`` before what follows a special token, too; without
    ``add_prefix_space`` nowhere. tokenizer.json has one of these, whatever the fields say. Models
    of other types than llama have tokenizers of their own, and so have those with BPE of bytes.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    fields : mapping
        Of tokenizer_config.json.
    model_type : str
        Of config.json.
    """
    from tokenizers import decoders, models, pre_tokenizers

    is_llama = model_type == "llama" and fields.get("tokenizer_class") in _CLASSES
    is_bpe = isinstance(tokenizer.model, models.BPE)
    if not is_llama or not is_bpe or isinstance(tokenizer.decoder, decoders.ByteLevel):
        return
    given = fields.get("add_prefix_space")
    has_space = given is None or bool(given)
    place = "never" if not has_space else "always" if fields.get("legacy") else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, place, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if has_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
