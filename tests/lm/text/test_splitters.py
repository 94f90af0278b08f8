# SPDX-License-Identifier: Apache-2.0
"""Splitters by their names in GGUF files, against tokenizers as published in tokenizer.json."""

from __future__ import annotations

import json

import pytest

tokenizers = pytest.importorskip("tokenizers")

from tvm_pagedkv_lm.gguf.metadata import Metadata  # noqa: E402
from tvm_pagedkv_lm.gguf.tokenizer import build_tokenizer  # noqa: E402
from tvm_pagedkv_lm.text.byte_level import byte_characters  # noqa: E402
from tvm_pagedkv_lm.text.splitters import SPLITTERS  # noqa: E402

TEXTS = [
    "I'LL see HTTPServer's naïve iPhone16, we'Ve 'told' O'Brien they'd 's; DON'T 'RE 'S ſ'ſ",
    "3 33 333 3333 33333 3.14 1,234,567 ٣٤٥٦ ½ Ⅻ १२३ 3.. 0x1F 2²  5   77",
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    end \r\n\r\n  x \u3000\u00a0 y   ",
    'def f(x):\n    return x**2  # см.\n\t<div class="a">&nbsp;</div>//\n/*!*/ a_b::C<T>{};\n',
    "月の下で写真を撮る、漢字とabc混在。！？…“引用”—【】ㄅㄆㄇ 한국어ㅋㅋ 가나다 𠀀𠀁龦",
    "Straße ÄRGER Ǆabc ﬁne Ωmega нещо на Български Ἀθῆναι ܫܠܡܐ ᏣᎳᎩ ꭳꭴ",
    "e\u0301tude A\u030angstro\u0308m हिन्दी नमस्ते ภาษาไทย កាន់តែពិសេស בְּרֵאשִׁית \u0301x \u200d",
    "😀 👍🏽 👩\u200d👩\u200d👧 🇫🇷✅ \u2603\ufe0f ''''''```````\"\"\"\"......!!!!!!???? -----=====",
    "$100 + 5% = €95 ^_^ ~/.bashrc `x` |a| <b> «c» ¿qué? @user #tag 。،، ۔، (a|b) \\n",
    "A zebra, zebra's.",
]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HAN_KANA = "[一-龥぀-ゟ゠-ヿ]+"
SIGNS = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~]"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
DIGITS, LIBRARY = {"type": "Digits", "individual_digits": True}, "use_regex"

# Names, and the steps of the published tokenizers: expressions, or pre-tokenizers of the library.
# Where `LIBRARY` is the last step, the step that makes characters of bytes splits as GPT-2 does.
PUBLISHED = [
    (("gpt-2", "default", "exaone4", "mellum", "a.x-4.0", "gigachat", "trillion"), [LIBRARY], ""),
    (("smollm", "starcoder", "refact", "minerva-7b"), [DIGITS, LIBRARY], ""),
    (("command-r",), [DIGITS, LIBRARY], "NFC"),
    (("olmo",), [LIBRARY], "NFC"),
    (("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), [GPT4], "merges"),
    (("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), [GPT4], ""),
    (("qwen2", "deepseek-r1-qwen", "megrez"), [QWEN2], "NFC"),
    (("hunyuan", "solar-open", "stablelm2", "grok-2"), [QWEN2], ""),
    (
        ("qwen35",),
        [
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
            r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ],
        "NFC",
    ),
    (
        ("seed-coder",),
        [
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}|"
            r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
        ],
        "",
    ),
    (("gpt-4o", "llama4", "kanana2"), [GPT4O], ""),
    (("tiny_aya",), [r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O], ""),
    (("tekken",), [TEKKEN], "merges"),
    (("minicpm5",), [r"\p{N}{1,3}", GPT4.replace("{1,3}", "+")], "merges"),
    (
        ("youtu",),
        [
            f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{HAN_KANA}",
            GPT4O.replace("{1,3}", ""),
        ],
        "merges",
    ),
    (
        ("deepseek-coder",),
        [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGITS],
        "",
    ),
    (
        ("deepseek-v3", "joyai-llm"),
        [
            r"\p{N}{1,3}",
            HAN_KANA,
            rf"{SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+|"
            r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        "",
    ),
    (("poro-chat",), [BLOOM], ""),
    (("viking",), [BLOOM, DIGITS], ""),
    (("superbpe",), [r"\p{N}+", r"(?=(\d{3})+(?!\d))"], ""),
]


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, list[str]]:
    """Merges that run across words, so that ids tell where a text was split."""
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900, min_frequency=1, initial_alphabet=byte_characters(), max_token_length=9
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.train_from_iterator(TEXTS[:-1], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens.append("Ġzebra")  # which no merges make
    return {"tokens": tokens, "merges": [" ".join(pair) for pair in model["merges"]]}


def published(vocabulary, steps, more: str) -> tokenizers.Tokenizer:
    """The tokenizer that a tokenizer.json with these steps describes."""
    splits = [
        step
        if isinstance(step, dict)
        else {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
        for step in steps
        if step != LIBRARY
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits.append(last | {"use_regex": LIBRARY in steps})
    model = {
        "type": "BPE", "ignore_merges": more == "merges", "merges": vocabulary["merges"],
        "vocab": {token: i for i, token in enumerate(vocabulary["tokens"])},
    }  # fmt: skip
    return tokenizers.Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": {"type": "NFC"} if more == "NFC" else None,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
                "model": model,
            }
        )
    )


@pytest.mark.parametrize(("names", "steps", "more"), PUBLISHED, ids=lambda x: str(x)[:16])
def test_ids_of_published_tokenizers(names, steps, more, vocabulary):
    expected = [published(vocabulary, steps, more).encode(text).ids for text in TEXTS]
    for name in names:
        keys = {"model": "gpt2", "pre": name, **vocabulary}
        values = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        tokenizer = build_tokenizer(Metadata({"general.architecture": "llama", **values}, "file"))
        for text, ids in zip(TEXTS, expected, strict=True):
            assert tokenizer.encode(text).ids == ids, (name, text)


def test_splitters_differ(vocabulary):
    """No two of them give the same ids for all of these texts, so the texts tell them apart."""
    ids = {}
    for names, steps, more in PUBLISHED:
        tokenizer = published(vocabulary, steps, more)
        found = tuple(tuple(tokenizer.encode(text).ids) for text in TEXTS)
        assert ids.setdefault(found, names) == names, (names, ids[found])


def test_every_name_stands_for_one_splitter():
    assert [*SPLITTERS] == [name for each in dict.fromkeys(SPLITTERS.values()) for name in each[0]]


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen2", "Qwen2"), ("command-r", "Cohere"), ("qwen35", "Qwen3_5")]
)
def test_ids_of_transformers(name, kind, vocabulary):
    """The tokenizers that transformers builds for these families."""
    transformers = pytest.importorskip("transformers")
    tokens = vocabulary["tokens"]
    theirs = getattr(transformers, f"{kind}Tokenizer")(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(pair.split(" ")) for pair in vocabulary["merges"]],
    )
    values = {f"tokenizer.ggml.{key}": each for key, each in vocabulary.items()}
    values |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name}
    ours = build_tokenizer(Metadata({"general.architecture": "llama", **values}, "file"))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False), text


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
