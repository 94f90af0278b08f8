# SPDX-License-Identifier: Apache-2.0
"""`Splitter`: how byte-level BPE splits a text into words before it merges, by its published name.

GGUF files name the splitter of a tokenizer in ``tokenizer.ggml.pre``; the expressions are those of
the models' ``tokenizer.json``. Each expression splits what the ones before it have left.
"""

from __future__ import annotations

from typing import NamedTuple

# Numerals one by one. The library has a pre-tokenizer for them, whose Unicode is newer than that of
# its expressions, so it is used wherever a ``tokenizer.json`` uses it.
DIGITS = r"\p{N}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s+(?!\S)|\s+"
_REST = rf"\s*[\r\n]+|{_SPACES}"
_SIGNS, _SIGNS_AND_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CHINESE = "[一-龥ࠀ-一가-퟿]+"
_KANA_AND_HAN = "[一-龥぀-ゟ゠-ヿ]+"

# Words that begin with capitals, or are of capitals: the two kinds that GPT-4o tells apart.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDS_LOWER = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_BEGINS_UPPER = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

# Chinese characters are letters, and words of their own to Kimi.
_UPPER_NO_HAN, _LOWER_NO_HAN = rf"{_UPPER[:-1]}&&[^\p{{Han}}]]", rf"{_LOWER[:-1]}&&[^\p{{Han}}]]"

_CASED = r"[\p{Lu}\p{Ll}\p{Lt}]"
_ASCII_SIGNS = "!-/:-@\\[-`{-~"
# Bloom's makers wrote a class for a group, so it has the signs "(", "|" and ")" as well.
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _either(*expressions: str) -> str:
    return "|".join(expressions)


def _with_numbers(numbers: str) -> str:
    """Return the expression of GPT-4 with other numbers, as most tokenizers have it."""
    return _either(_CONTRACTIONS, _LETTERS, numbers, _SIGNS, _REST)


def _with_cases(contractions: str, numbers: str) -> str:
    """Return the expression of GPT-4o, with other contractions and numbers."""
    words = (f"{_ENDS_LOWER}{contractions}", f"{_BEGINS_UPPER}{contractions}")
    return _either(*words, numbers, _SIGNS_AND_SLASH, _REST)


_GPT4 = _with_numbers(r"\p{N}{1,3}")
_GPT4O = _with_cases(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")


class Splitter(NamedTuple):
    """What byte-level BPE does to a text before it merges, and what belongs to it.

    Attributes
    ----------
    names : tuple of str
        Its names in GGUF files.
    expressions : tuple of str
        Regular expressions, applied one after another; matches and what is between them are words.
    ignores_merges : bool
        Whether a word that is a token needs no merges.
    adds_bos : bool
        Whether BOS goes before a text where the file does not say.
    is_nfc : bool
        Whether texts are normalized to NFC first.
    """

    names: tuple[str, ...]
    expressions: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    is_nfc: bool = False


_TABLE = (
    Splitter(
        (
            "default", "gpt-2", "phi-2", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4",
            "trillion", "granite-docling",
        ),
        (_GPT2,),
    ),
    Splitter(("olmo", "mpt"), (_GPT2,), is_nfc=True),
    Splitter(
        ("smollm", "starcoder", "refact", "codeshell", "minerva-7b", "exaone", "mellum2"),
        (DIGITS, _GPT2),
    ),
    Splitter(("command-r",), (DIGITS, _GPT2), is_nfc=True),
    Splitter(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        (_GPT4,),
        ignores_merges=True,
        adds_bos=True,
    ),
    Splitter(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_GPT4,)),
    Splitter(("minicpm5",), (r"\p{N}{1,3}", _with_numbers(r"\p{N}+")), ignores_merges=True),
    Splitter(("qwen2", "deepseek-r1-qwen", "megrez"), (_with_numbers(r"\p{N}"),), is_nfc=True),
    Splitter(
        ("stablelm2", "hunyuan", "solar-open", "kormo", "grok-2"), (_with_numbers(r"\p{N}"),)
    ),
    Splitter(
        ("qwen35",),
        (
            _either(
                _CONTRACTIONS,
                r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                r"\p{N}",
                r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                _REST,
            ),
        ),
        is_nfc=True,
    ),
    Splitter(
        ("seed-coder",),
        (_either(_CONTRACTIONS, _LETTERS, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _REST),),
    ),
    Splitter(("ufakzeka",), (_either(_LETTERS, r"\p{N}", _SIGNS, _REST),)),
    Splitter(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
    Splitter(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    Splitter(("tekken",), (_with_cases("", r"\p{N}"),), ignores_merges=True, adds_bos=True),
    Splitter(
        ("kimi-k2",),
        (
            _either(
                r"\p{Han}+",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}*{_LOWER_NO_HAN}+{_CONTRACTIONS}?",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}+{_LOWER_NO_HAN}*{_CONTRACTIONS}?",
                r"\p{N}{1,3}",
                _SIGNS,
                _REST,
            ),
        ),
        ignores_merges=True,
    ),
    Splitter(
        ("youtu",),
        (
            _either("[가-힣ㄱ-ㆎ]+", "[！…“”‘’—：；，、-〿︰-﹏]+", "[ㄅ-ㄯ]+", _KANA_AND_HAN),
            _with_cases(f"{_CONTRACTIONS}?", r"\p{N}"),
        ),
        ignores_merges=True,
    ),
    Splitter(
        ("deepseek-llm",),
        (
            r"[\r\n]",
            rf"\s?{_CASED}+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _CHINESE,
            DIGITS,
        ),
    ),
    Splitter(
        ("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, DIGITS)
    ),
    Splitter(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        (
            r"\p{N}{1,3}",
            _KANA_AND_HAN,
            _either(
                rf"[{_ASCII_SIGNS}][A-Za-z]+",
                r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
                r" ?[\p{P}\p{S}]+[\r\n]*",
                _REST,
            ),
        ),
    ),
    Splitter(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    Splitter(("viking",), (_BLOOM, DIGITS)),
    Splitter(("superbpe",), (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
)  # fmt: skip

SPLITTERS = {name: splitter for splitter in _TABLE for name in splitter.names}
