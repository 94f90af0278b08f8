# SPDX-License-Identifier: Apache-2.0
"""A tokenizer and the ends of a text from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .metadata import Metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # what stands for a space in SentencePiece's tokens

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDS_LOWER = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_BEGINS_UPPER = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS, _SIGNS_AND_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CL100K = "|".join((_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _SIGNS, _REST))

# Chinese characters are letters, and words of their own to Kimi.
_UPPER_NO_HAN, _LOWER_NO_HAN = rf"{_UPPER[:-1]}&&[^\p{{Han}}]]", rf"{_LOWER[:-1]}&&[^\p{{Han}}]]"

_CASED = r"[\p{Lu}\p{Ll}\p{Lt}]"
_ASCII_SIGNS = "!-/:-@\\[-`{-~"

# tokenizer.ggml.pre -> the expressions that split a text before BPE, one after another; None:
# GPT-2's own.
SPLITS: dict[str, str | tuple[str, ...] | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _CL100K,
    "dbrx": _CL100K,
    "glm4": _CL100K,
    "chatglm-bpe": _CL100K,
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?{_CASED}+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        "|".join(
            (
                rf"[{_ASCII_SIGNS}][A-Za-z]+",
                r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
                r" ?[\p{P}\p{S}]+[\r\n]*",
                _REST,
            )
        ),
    ),
    "qwen2": "|".join((_CONTRACTIONS, _LETTERS, r"\p{N}", _SIGNS, _REST)),
    "gpt-4o": "|".join(
        (
            f"{_ENDS_LOWER}{_CONTRACTIONS}?",
            f"{_BEGINS_UPPER}{_CONTRACTIONS}?",
            r"\p{N}{1,3}",
            _SIGNS_AND_SLASH,
            _REST,
        )
    ),
    "kimi-k2": "|".join(
        (
            r"\p{Han}+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}*{_LOWER_NO_HAN}+{_CONTRACTIONS}?",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}+{_LOWER_NO_HAN}*{_CONTRACTIONS}?",
            r"\p{N}{1,3}",
            _SIGNS,
            _REST,
        )
    ),
    "tekken": "|".join((_ENDS_LOWER, _BEGINS_UPPER, r"\p{N}", _SIGNS_AND_SLASH, _REST)),
}
_SPLITS_DIGITS = ("smollm", "deepseek-llm")
_IGNORES_MERGES = ("llama-bpe", "tekken")  # a word that is a token needs no merges
_ADDS_BOS = ("llama-bpe", "tekken")  # where the file does not say

# Special tokens that end a turn or a text, whether or not the file names them as such.
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<turn|>", "<|tool_response>", "[EOS]", "[EOT]",
)  # fmt: skip


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Return the tokenizer.

    Raises
    ------
    ValueError
        If its kind is not supported; the message names the key.
    """
    from tokenizers import AddedToken

    tokens = metadata.get("tokenizer.ggml.tokens", list)
    types = metadata.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.token_type has {len(types)} values for {len(tokens)} tokens"
        )
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
    for type_id, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
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
    _add_bos_and_eos(tokenizer, metadata, tokens, adds_bos)
    return tokenizer


def end_tokens(metadata: Metadata) -> list[int]:
    """Return the ids of all tokens that end a text."""
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    types = metadata.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    names = ("eos", "eot", "eom")
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id", int, None) for name in names]
    ids += metadata.get("tokenizer.ggml.eos_token_ids", list, [])
    special = (_CONTROL, _USER_DEFINED)
    ends = (i for i, each in enumerate(types) if each in special and tokens[i] in _ENDS)
    return [*dict.fromkeys(i for i in (*ids, *ends) if i is not None)]


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Return special tokens by their names in chat templates, such as "bos_token"."""
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"}
    found = {}
    for theirs, ours in names.items():
        token = metadata.get(f"tokenizer.ggml.{theirs}_token_id", int, None)
        if token is not None:
            found[f"{ours}_token"] = _token(tokens, theirs, token)
    return found


def _token(tokens: Sequence[str], name: str, token: int) -> str:
    if not 0 <= token < len(tokens):
        raise ValueError(
            f"tokenizer.ggml.{name}_token_id {token} is not in the vocabulary of {len(tokens)}"
        )
    return tokens[token]


# --- kinds --------------------------------------------------------------------------------------


def _byte_level(metadata: Metadata, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return the BPE of bytes that GPT-2 began, and whether it puts BOS first by default."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre", str, "default")
    if name not in SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre {name!r} is not supported; expected one of {', '.join(SPLITS)}"
        )
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", list)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in _IGNORES_MERGES)
    tokenizer = Tokenizer(bpe)
    steps: list[Any] = []
    if name in _SPLITS_DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    split = SPLITS[name]
    for each in () if split is None else (split,) if isinstance(split, str) else split:
        steps.append(pre_tokenizers.Split(Regex(each), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, name in _ADDS_BOS


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
    unknown = next((t for t, each in zip(tokens, types, strict=True) if each == _UNKNOWN), None)
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


def merges_of(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, those with the highest score first."""
    found = []
    for token, index in vocabulary.items():
        for end in range(1, len(token)):
            left, right = vocabulary.get(token[:end]), vocabulary.get(token[end:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right, (token[:end], token[end:])))
    return [pair for *_, pair in sorted(found)]


def _add_bos_and_eos(
    tokenizer: Tokenizer, metadata: Metadata, tokens: Sequence[str], adds_bos: bool
) -> None:
    """Let the tokenizer put BOS before a text and EOS after it, if the file asks for them."""
    from tokenizers.processors import TemplateProcessing

    pieces, used = ["$A"], []
    for name, default in (("bos", adds_bos), ("eos", False)):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id", int, None)
        is_added = metadata.get(f"tokenizer.ggml.add_{name}_token", bool, default)
        if name == "bos" and metadata.get("tokenizer.ggml.model", str) == "gemma4":
            is_added = True  # the models expect it; their first files say that they do not
        if is_added and token is not None:
            used.append((_token(tokens, name, token), token))
            pieces.insert(0 if name == "bos" else len(pieces), used[-1][0])
    if used:
        tokenizer.post_processor = TemplateProcessing(single=pieces, special_tokens=used)
