# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from the metadata of GGUF files."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from tvm_pagedkv_lm.gguf.metadata import Metadata
from tvm_pagedkv_lm.gguf.special_tokens import end_tokens, named_tokens
from tvm_pagedkv_lm.gguf.tokenizer import build_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"


def metadata_of(architecture: str = "llama", **keys) -> Metadata:
    values = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return Metadata({"general.architecture": architecture, **values}, "file")


# --- SentencePiece ------------------------------------------------------------------------------


def vocabulary(random: np.random.Generator):
    """Bytes, letters, and tokens made of two others, with scores in a random order."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    pieces = [SPACE, *"abcde"]
    while len(pieces) < 60:
        left, right = random.choice(pieces, 2)
        if left + right not in pieces and len(left + right) < 7:
            pieces.append(str(left + right))
    scores = [0.0] * len(tokens) + [-1000.0] * 6
    scores += (-1.0 - random.permutation(len(pieces) - 6)).tolist()
    return tokens + pieces, types + [NORMAL] * len(pieces), scores


def merged(text: str, tokens: list[str], scores: list[float]) -> list[str]:
    """SentencePiece's BPE in plain Python: always the adjacent pair with the best score."""
    pieces, score = list(text), dict(zip(tokens, scores, strict=True))
    while True:
        couples = enumerate(zip(pieces, pieces[1:], strict=False))
        pairs = [(-score[a + b], i) for i, (a, b) in couples if a + b in score]
        if not pairs:
            break
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    found = []
    for piece in pieces:
        found += [piece] if piece in score else [f"<0x{b:02X}>" for b in piece.encode()]
    return found


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentence_piece_merges_by_score(has_prefix):
    print("seed 3")
    random = np.random.default_rng(3)
    tokens, types, scores = vocabulary(random)
    tokenizer = build_tokenizer(
        metadata_of(
            model="llama", tokens=tokens, token_type=types, scores=scores,
            add_space_prefix=has_prefix, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    for _ in range(100):
        text = "".join(random.choice([*"abcde ", "é", "\n"], 20)).strip() or "a"
        prefix = SPACE if has_prefix else ""
        expected = merged(prefix + text.replace(" ", SPACE), tokens, scores)
        encoded = tokenizer.encode(text)
        assert encoded.tokens == ["<s>", *expected], repr(text)
        assert tokenizer.decode(encoded.ids) == text


def test_merges_of_gemma4():
    """Its files have merges, in whose order they apply, and spaces as SentencePiece has them."""
    tokens = ["<pad>", "<bos>", "a", "b", SPACE, "ab", f"{SPACE}ab", "ba", "<0xC3>", "<0xA9>"]
    types = [CONTROL, CONTROL, *[NORMAL] * 6, BYTE, BYTE]
    metadata = metadata_of(
        "gemma4", model="gemma4", tokens=tokens, token_type=types, scores=[0.0] * len(tokens),
        merges=["b a", "a b", f"{SPACE} ab"], add_space_prefix=False, bos_token_id=1,
    )  # fmt: skip
    tokenizer = build_tokenizer(metadata)
    encoded = tokenizer.encode("ab aba\u00e9")
    assert encoded.tokens == ["<bos>", "ab", SPACE, "a", "ba", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoded.ids) == "ab aba\u00e9"
    assert tokenizer.encode(" ab").tokens == ["<bos>", f"{SPACE}ab"]


def test_lines_after_tokens_of_phi3():
    """Its templates write a line after such a token, which the model never saw."""
    tokens = ["<unk>", "<s>", "<|end|>", "<0x0A>", "a"]
    types = [UNKNOWN, CONTROL, CONTROL, BYTE, NORMAL]
    for architecture, expected in (
        ("phi3", [2, 4]),
        ("llama", [2, 3, 4]),
    ):
        metadata = metadata_of(
            architecture, model="llama", tokens=tokens, token_type=types, scores=[0.0] * 5,
            add_space_prefix=False, add_bos_token=False,
        )  # fmt: skip
        assert build_tokenizer(metadata).encode("<|end|>\na").ids == expected
        assert end_tokens(metadata) == [2]


# --- byte-level BPE -----------------------------------------------------------------------------

TEXT = "I'LL see HTTPServer's 12345 naïve\n\n  x!//\nend"


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", ["I", "'", "LL", " see", " HTTPServer", "'s", " 12345", " naïve", "\n\n ", " x",
                   "!//", "\n", "end"]),
        ("smollm", ["I", "'", "LL", " see", " HTTPServer", "'s", " ", "1", "2", "3", "4", "5",
                    " naïve", "\n\n ", " x", "!//", "\n", "end"]),
        ("llama-bpe", ["I", "'LL", " see", " HTTPServer", "'s", " ", "123", "45", " naïve", "\n\n",
                       " ", " x", "!//\n", "end"]),
        ("qwen2", ["I", "'LL", " see", " HTTPServer", "'s", " ", "1", "2", "3", "4", "5", " naïve",
                   "\n\n", " ", " x", "!//\n", "end"]),
        ("gpt-4o", ["I'LL", " see", " HTTPServer's", " ", "123", "45", " naïve", "\n\n", " ", " x",
                    "!//\n", "end"]),
        ("glm4", ["I", "'LL", " see", " HTTPServer", "'s", " ", "123", "45", " naïve", "\n\n", " ",
                  " x", "!//\n", "end"]),
        ("deepseek-llm", ["I", "'", "LL", " see", " HTTPServer", "'", "s", " ", "1", "2", "3", "4",
                          "5", " na", "ï", "ve", "\n", "\n", " ", " x", "!//", "\n", "end"]),
        ("deepseek-v3", ["I", "'LL", " see", " HTTPServer", "'s", " ", "123", "45", " naïve",
                         "\n\n", " ", " x", "!//\n", "end"]),
        ("kimi-k2", ["I'LL", " see", " HTTPServer's", " ", "123", "45", " naïve", "\n\n", " ", " x",
                     "!//\n", "end"]),
        ("tekken", ["I", "'LL", " see", " HTTPServer", "'s", " ", "1", "2", "3", "4", "5", " naïve",
                    "\n\n", " ", " x", "!//\n", "end"]),
    ],
)  # fmt: skip
def test_splits(name, pieces):
    """Where words end before BPE, by the expression that the tokenizer's name stands for."""
    metadata = metadata_of(model="gpt2", pre=name, tokens=["a", "b", "ab"], merges=["a b"])
    spans = build_tokenizer(metadata).pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[begin:end] for _, (begin, end) in spans] == pieces


def test_chinese_words_of_kimi():
    metadata = metadata_of(model="gpt2", pre="kimi-k2", tokens=["a", "b", "ab"], merges=["a b"])
    text = "iPhone世界ab 中Éa あd文's"
    spans = build_tokenizer(metadata).pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in spans] == [
        "i", "Phone", "世界", "ab", " ", "中", "Éa", " あd", "文", "'s"
    ]  # fmt: skip


def test_ends_and_bos_of_gemma4():
    """Its files name one end of three, and the first ones say that no BOS is added."""
    tokens = ["<pad>", "<eos>", "<bos>", "a", "<|tool_response>", "<turn|>", SPACE]
    types = [CONTROL, CONTROL, CONTROL, NORMAL, USER, CONTROL, NORMAL]
    keys = {"model": "gemma4", "tokens": tokens, "token_type": types, "merges": []}
    keys |= {"bos_token_id": 2, "eos_token_id": 1}
    metadata = metadata_of("gemma4", **keys, add_bos_token=False)
    assert end_tokens(metadata) == [1, 4, 5]
    assert build_tokenizer(metadata).encode("a").ids == [2, 3]
    ends = metadata_of(**keys | {"token_type": [NORMAL] * 7}, eos_token_ids=[1, 5, 4])
    assert end_tokens(ends) == [1, 5, 4]


def test_added_tokens_and_ends():
    tokens = ["a", "b", "ab", "<bos>", "<eos>", "<|im_end|>", "<think>"]
    keys = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [NORMAL] * 3 + [CONTROL] * 3 + [USER],
        "merges": ["a b"],
        "bos_token_id": 3,
        "eos_token_id": 4,
    }
    metadata = metadata_of(**keys)
    tokenizer = build_tokenizer(metadata)
    assert tokenizer.encode("ab<|im_end|>b<think>").ids == [2, 5, 1, 6]
    assert tokenizer.decode([2, 5, 6, 1], skip_special_tokens=True) == "ab<think>b"
    assert end_tokens(metadata) == [4, 5]
    assert named_tokens(metadata) == {"bos_token": "<bos>", "eos_token": "<eos>"}
    both = build_tokenizer(metadata_of(**keys, add_bos_token=True, add_eos_token=True))
    assert both.encode("ab").ids == [3, 2, 4]
    assert both.encode("ab", add_special_tokens=False).ids == [2]
    assert build_tokenizer(metadata_of(**keys | {"pre": "llama-bpe"})).encode("ab").ids == [3, 2]
    with pytest.raises(ValueError, match="tokenizer.ggml.eos_token_id 9 is not in the vocabulary"):
        named_tokens(metadata_of(**keys | {"eos_token_id": 9}))


# --- special tokens -----------------------------------------------------------------------------


def ends_of(tokens: list[str], kind: int = CONTROL, **keys) -> list[str]:
    """The texts of the tokens that end a text, of a file that says little about them."""
    keys = {"model": "gpt2", "token_type": [kind] * len(tokens)} | keys
    metadata = metadata_of(**{key: x for key, x in keys.items() if x is not None}, tokens=tokens)
    return [tokens[i] for i in end_tokens(metadata)]


def test_ends_that_only_their_names_tell():
    ends = [
        "<|END_OF_TURN_TOKEN|>",
        "[|endofturn|]",
        "<|EOT|>",
        "</s>",
        "<\uff5cend▁of▁sentence\uff5c>",
    ]
    assert ends_of(["a", *ends, "<|user|>"]) == ends
    # Tokens in bars count whatever their type is; Gemma has a tag of HTML that is another's EOS.
    assert ends_of(["<|im_end|>", "</s>", "<end_of_turn>"], USER) == ["<|im_end|>", "<end_of_turn>"]
    assert ends_of(["<|im_end|>", "</s>", "<|tool_response>", "[EOS]"], NORMAL) == ["<|im_end|>"]


def test_end_of_a_message_is_no_end_of_a_turn():
    """GPT-OSS ends its thoughts with the token that ends the turns of Phi."""
    assert ends_of(["<|end|>", "<|user|>"]) == ["<|end|>"]
    harmony = ["<|return|>", "<|end|>", "<|call|>"]
    assert ends_of(harmony, eos_token_id=0, eot_token_id=1) == ["<|return|>", "<|call|>"]


def test_normal_tokens_in_bars_are_special():
    tokens = ["a", "b", "<|im_end|>", "<s>"]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": [], "bos_token_id": 3}
    typed = build_tokenizer(metadata_of(**keys, token_type=[NORMAL] * 4))
    assert typed.encode("a<|im_end|>b").ids == [0, 2, 1]
    untyped = build_tokenizer(metadata_of(**keys))  # BOS is special, as a key names it
    assert untyped.encode("<s>a<|im_end|>").ids == [3, 0, 2]
    assert untyped.decode([3, 0, 2]) == "a"


@pytest.mark.parametrize("absent", [-1, 2**32 - 1])
def test_special_tokens_that_there_are_none_of(absent):
    ids = {f"{name}_token_id": absent for name in ("bos", "eos", "eot", "padding", "unknown")}
    keys = {"model": "gpt2", "pre": "llama-bpe", "tokens": ["a", "b"], "merges": []}
    metadata = metadata_of(**keys, **ids, eos_token_ids=[absent, 1])
    assert end_tokens(metadata) == [1] and named_tokens(metadata) == {}
    assert build_tokenizer(metadata).encode("ab").ids == [0, 1]


def test_padding_outside_the_vocabulary_is_left_out():
    metadata = metadata_of(model="gpt2", tokens=["a", "b"], eos_token_id=1, padding_token_id=2)
    assert named_tokens(metadata) == {"eos_token": "b"}
    with pytest.raises(ValueError, match="tokenizer.ggml.eos_token_id 2 is not in the vocabulary"):
        end_tokens(metadata_of(model="gpt2", tokens=["a", "b"], eos_token_id=2))


def test_ids_of_sentence_piece_that_no_key_names():
    tokens = ["<unk>", "<s>", "</s>", SPACE, "a", f"{SPACE}a"]
    keys = {"model": "llama", "tokens": tokens, "scores": [0.0] * 3 + [-1.0, -1.0, -0.5]}
    for types in ([UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL], None):
        given = {} if types is None else {"token_type": types}
        metadata = metadata_of(**keys, **given)
        assert build_tokenizer(metadata).encode("a!").ids == [1, 5, 0]
        assert end_tokens(metadata) == [2]
    assert build_tokenizer(metadata_of(**keys, bos_token_id=-1)).encode("a").ids == [5]


def test_files_that_do_not_name_the_splitter():
    """The first files of Llama 3 and Qwen do not; other models would be split wrongly."""
    keys = {"model": "gpt2", "tokens": ["1", "2"], "merges": []}
    for architecture, pieces in (("llama", ["123", "4"]), ("qwen2", [*"1234"]), ("phi3", ["1234"])):
        with pytest.warns(UserWarning, match="lacks the key tokenizer.ggml.pre; '.*' is assumed"):
            tokenizer = build_tokenizer(metadata_of(architecture, **keys))
        assert [x for x, _ in tokenizer.pre_tokenizer.pre_tokenize_str("1234")] == pieces


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
