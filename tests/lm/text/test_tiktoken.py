# SPDX-License-Identifier: Apache-2.0
"""Tokenizers in ``tiktoken.model``, against BPE by ranks in Python."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")
regex = pytest.importorskip("regex")

from tvm_pagedkv_lm.model.source import HuggingFaceModel  # noqa: E402
from tvm_pagedkv_lm.text.splitters import SPLITTERS  # noqa: E402

TEXT = (
    "It's 1234 degrees, they'LL say; ÄRGER über Straßen und HTTPServer v2.0!\n\n"
    "  月の下で写真を撮る、漢字とabc混在。\tтекст   \r\n\N{GRINNING FACE}\N{THUMBS UP SIGN} "
    "def f(x):\n    return x**2\n"
)
NUM_TOKENS = 336
KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "added_tokens_decoder": {
        "336": {"content": "[BOS]", "special": True},
        "338": {"content": "<think>", "special": False},
    },
}


def write(folder: Path, config: dict) -> list[bytes]:
    """Write a tokenizer of 256 bytes and 80 merges of random ones; the tokens by rank."""
    random = np.random.default_rng(0)
    tokens = [bytes([byte]) for byte in random.permutation(256).tolist()]
    pieces = [piece.encode() for piece in regex.findall(r"\S+|\s+", TEXT)]
    while len(tokens) < NUM_TOKENS:
        pairs = [a + b for piece in pieces for a, b in pairwise(merged(piece, tokens))]
        tokens.append(pairs[random.integers(len(pairs))])
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokens


def merged(piece: bytes, tokens: list[bytes]) -> list[bytes]:
    """Merge pairs of a piece of text, the one whose token has the lowest rank first."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if piece in ranks:
        return [piece]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return parts
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_tokens_of_a_text(tmp_path):
    tokens = write(tmp_path, KIMI)
    tokenizer = HuggingFaceModel(tmp_path).tokenizer()
    (expression,) = SPLITTERS["kimi-k2"].expressions
    split = regex.compile(expression, regex.V1)
    pieces = split.findall(TEXT)
    assert "".join(pieces) == TEXT
    expected = [tokens.index(t) for piece in pieces for t in merged(piece.encode(), tokens)]
    found = tokenizer.encode(TEXT).ids
    assert found == expected and len(found) < 0.8 * len(TEXT.encode())
    assert tokenizer.decode(found) == TEXT


def test_tokens_behind_those_of_the_file(tmp_path):
    write(tmp_path, KIMI)
    tokenizer = HuggingFaceModel(tmp_path).tokenizer()
    assert tokenizer.encode("[BOS]<think><|reserved_token_337|>").ids == [336, 338, 337]
    assert tokenizer.get_vocab_size() == NUM_TOKENS + 256
    assert tokenizer.decode([336, 338], skip_special_tokens=True) == "<think>"


@pytest.mark.parametrize(
    ("config", "content", "message"),
    [
        ({}, None, "tokenizer_class must be 'TikTokenTokenizer', as in Kimi's models, .* got None"),
        (KIMI, b"IQ== 0\nx\n", "expected base64 and a rank in a line, got b'x'"),
        (KIMI, b"IQ== 0\n!! 1\n", "expected base64 and a rank in a line, got b'!! 1'"),
        (KIMI, b"IQ== 0\nIg== 2\n", "must have all bytes, and ranks from 0 on without gaps"),
    ],
)
def test_what_is_refused(config, content, message, tmp_path):
    write(tmp_path, config)
    if content is not None:
        (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        HuggingFaceModel(tmp_path).tokenizer()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
