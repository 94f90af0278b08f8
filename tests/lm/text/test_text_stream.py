# SPDX-License-Identifier: Apache-2.0
"""Text of tokens as they come, where tokens are bytes and spaces stand before words."""

from __future__ import annotations

import pytest

tokenizers = pytest.importorskip("tokenizers")

from tvm_pagedkv_lm import DecoderModel, generate  # noqa: E402
from tvm_pagedkv_lm.engine.text_stream import TextStream  # noqa: E402

SPACE = "\u2581"


@pytest.fixture(scope="module")
def sentence_piece():
    """As Llama 2 and Mistral have it: the space before a text is left out."""
    words = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), f"{SPACE}Hello", f"{SPACE}world", "b"]
    vocabulary = {word: i for i, word in enumerate(words)}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    tokenizer, decoders = tokenizers.Tokenizer(model), tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("before", "tokens", "expected"),
    [
        ("", f"{SPACE}Hello {SPACE}world b", ["Hello", " world", "b"]),
        (f"{SPACE}Hello", f"{SPACE}world b", [" world", "b"]),
        (f"{SPACE}Hello <0xC3> <0xA9>", "<0xC3> <0xA9> b", ["", "é", "b"]),
        (f"{SPACE}Hello b <0x0A>", f"{SPACE}world", [" world"]),
        # A byte that begins no character makes the line before it another text.
        ("", f"{SPACE}Hello <0x0A> <0xE2> b {SPACE}world", ["Hello", "\n", "", "b", " world"]),
        ("", "<0xC3> <0xA9> <0xE2> b b", ["", "é", "", "b", "b"]),
    ],
)
def test_pieces(sentence_piece, before, tokens, expected):
    ids = [[sentence_piece.token_to_id(each) for each in text.split()] for text in (before, tokens)]
    stream = TextStream(sentence_piece, ids[0])
    assert [stream.push(token) for token in ids[1]] == expected


def test_prompts_that_are_no_text():
    model = DecoderModel.from_pretrained()
    with pytest.raises(ValueError, match="prompt 2 is not UTF-8 text: surrogates not allowed at 1"):
        generate(model, ["a", "a\udc80"])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
