# SPDX-License-Identifier: Apache-2.0
"""Answers with thoughts, which are neither said nor answered to."""

from __future__ import annotations

import json

import pytest

tokenizers = pytest.importorskip("tokenizers")

from tvm_pagedkv_lm import (  # noqa: E402
    Conversation,
    DecoderModel,
    SamplingParams,
    generate,
    load_session,
    save_session,
)
from tvm_pagedkv_lm.engine import batch  # noqa: E402
from tvm_pagedkv_lm.engine.answer_parts import AnswerParts, said  # noqa: E402
from tvm_pagedkv_lm.engine.text_stream import TextStream  # noqa: E402

MARKS = {"<|start|>": 1, "<|channel|>": 2, "<|message|>": 3, "<|end|>": 4}  # instead of bytes
THOUGHT = "<|channel|>analysis<|message|>Who asks?<|end|><|start|>assistant"
BLOCKS = {"<|channel>": 5, "<channel|>": 6}  # of Gemma 4
BLOCK = "<|channel>thought\nWho asks?<channel|>"


def with_marks(tokenizer, marks=MARKS, special=True):
    """Return a tokenizer of bytes, some of which are the marks of a format."""
    fields = json.loads(tokenizer.to_str())
    byte_of = {token: byte for byte, token in fields["model"]["vocab"].items()}
    for mark, token in marks.items():
        del fields["model"]["vocab"][byte_of[token]]
        fields["model"]["vocab"][mark] = token
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        fields["added_tokens"].append({"id": token, "content": mark, "special": special, **flags})
    fields["added_tokens"].sort(key=lambda each: each["id"])
    return tokenizers.Tokenizer.from_str(json.dumps(fields))


def tokens_of(text: str) -> list[int]:
    for mark, token in (MARKS | BLOCKS).items():
        text = text.replace(mark, chr(token))
    return [*text.encode()]


def parts_of(text: str, tokenizer) -> AnswerParts:
    """Take a text of ASCII characters, a token each."""
    parts = AnswerParts(tokenizer)
    pieces = [
        parts.take(token, "" if token in MARKS.values() else chr(token))
        for token in tokens_of(text)
    ]
    assert "".join(pieces) == parts.said
    return parts


@pytest.fixture(scope="module")
def model():
    return DecoderModel.from_pretrained()


@pytest.fixture
def harmony(model, monkeypatch):
    """Let the model have such a tokenizer, and answer with what the test says."""
    monkeypatch.setattr(model, "tokenizer", with_marks(model.tokenizer))
    script: list[int] = []
    monkeypatch.setattr(batch, "sample", lambda *_: script.pop(0))
    return script


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>You.", "Who asks?", "You."),
        ("<|channel|>final<|message|>Hi", "", "Hi"),
        ("no marks at all", "", "no marks at all"),
        ("<|channel|>analysis<|message|>cut o", "cut o", ""),
        ("<|channel|>anal", "", ""),
        (f"{THOUGHT}<|channel|>commentary to=f <|message|>{{}}<|end|>", "Who asks?{}", ""),
        (f"{THOUGHT}<|message|>bare", "Who asks?", "bare"),
        (f"{THOUGHT}<|channel|>final<|message|>a<|end|><|start|>x<|channel|>final<|message|>b",
         "Who asks?", "ab"),
    ],
)  # fmt: skip
def test_parts(model, text, thought, answer):
    parts = parts_of(text, with_marks(model.tokenizer))
    assert (parts.thought, parts.said) == (thought, answer)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        (f"{BLOCK}You.", "Who asks?", "You."),
        ("<|channel>thought\n<channel|>Hi", "", "Hi"),
        ("no marks at all", "", "no marks at all"),
        ("<|channel>thought\ncut o", "cut o", ""),
        ("<|channel>thou", "", ""),
        ("<|channel>thought<channel|>Hi", "", "Hi"),
        (f"a{BLOCK}b<|channel>thought\nl1\nl2<channel|>\nc", "Who asks?l1\nl2", "ab\nc"),
        ("<channel|>Hi", "", "Hi"),
    ],
)
def test_blocks(model, text, thought, answer, special):
    tokenizer = with_marks(model.tokenizer, BLOCKS, special)
    parts, stream = AnswerParts(tokenizer), TextStream(tokenizer)
    pieces = [parts.take(token, stream.push(token)) for token in tokens_of(text)]
    assert (parts.thought, parts.said) == (thought, answer) and "".join(pieces) == answer


def test_other_tokenizers_say_everything(model):
    """Of the marks, one alone means nothing."""
    text = "<|channel|>final<|message|>Hi"
    parts = AnswerParts(model.tokenizer)
    assert "".join(parts.take(token, chr(token)) for token in tokens_of(text)) == parts.said
    assert len(parts.said) == len(tokens_of(text)) and not parts.thought


def test_a_conversation_answers_to_what_was_said(model, harmony, tmp_path):
    params = SamplingParams(temperature=0, max_tokens=80)
    chat = Conversation(model, params, max_total_tokens=400)
    for answer in ("Me.", "é!"):  # a character of two tokens
        harmony[:] = tokens_of(f"{THOUGHT}<|channel|>final<|message|>{answer}")
        harmony.append(model.config.eos_token_ids[0])
        assert "".join(chat.reply("Hello?")) == answer
        assert chat.last_turn.thought == "Who asks?"
        assert chat.messages[-1] == {
            "role": "assistant", "content": answer, "thinking": "Who asks?"
        }  # fmt: skip
    save_session(chat, tmp_path / "chat.json", model="m")
    other = Conversation(model, params, max_total_tokens=400)
    load_session(other, tmp_path / "chat.json", model="m")
    assert other.messages == chat.messages


@pytest.mark.parametrize("form", ["channels", "blocks"])
@pytest.mark.parametrize("stop", [(), ("thanks",), ("lol",), ("see also",), ("ask?x",)], ids=str)
def test_events_have_what_is_said(model, harmony, stop, form, monkeypatch):
    """Also where the name of a channel may be the beginning of a stop string."""
    text = f"{THOUGHT}<|channel|>final<|message|>You, é."
    if form == "blocks":
        text = f"{BLOCK}You, é."
        monkeypatch.setattr(model, "tokenizer", with_marks(model.tokenizer, BLOCKS))
    harmony[:] = [*tokens_of(text), model.config.eos_token_ids[0]]
    params = SamplingParams(temperature=0, max_tokens=100, stop=stop)
    *events, finished, _ = said(generate(model, ["Who?"], params), model.tokenizer)
    assert "".join(event.text for event in events) == finished.text == "You, é."
    assert [event.token for event in events] == tokens_of(text)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
