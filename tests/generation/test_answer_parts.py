# SPDX-License-Identifier: Apache-2.0
"""Answers in the harmony format: what is thought is neither said nor answered to."""

from __future__ import annotations

import json

import pytest

tokenizers = pytest.importorskip("tokenizers")

from tvm_pagedkv.generation import (  # noqa: E402
    Conversation,
    SamplingParams,
    batch,
    generate,
    load_session,
    save_session,
)
from tvm_pagedkv.generation.answer_parts import AnswerParts, said  # noqa: E402
from tvm_pagedkv.models import DecoderModel  # noqa: E402

MARKS = {"<|start|>": 1, "<|channel|>": 2, "<|message|>": 3, "<|end|>": 4}  # instead of bytes
THOUGHT = "<|channel|>analysis<|message|>Who asks?<|end|><|start|>assistant"


def with_marks(tokenizer):
    """Return a tokenizer of bytes, some of which are the marks of the harmony format."""
    fields = json.loads(tokenizer.to_str())
    byte_of = {token: byte for byte, token in fields["model"]["vocab"].items()}
    for mark, token in MARKS.items():
        del fields["model"]["vocab"][byte_of[token]]
        fields["model"]["vocab"][mark] = token
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        fields["added_tokens"].append({"id": token, "content": mark, "special": True, **flags})
    fields["added_tokens"].sort(key=lambda each: each["id"])
    return tokenizers.Tokenizer.from_str(json.dumps(fields))


def tokens_of(text: str) -> list[int]:
    for mark, token in MARKS.items():
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


@pytest.mark.parametrize("stop", [(), ("thanks",), ("lol",), ("see also",)], ids=str)
def test_events_have_what_is_said(model, harmony, stop):
    """Also where the name of a channel may be the beginning of a stop string."""
    text = f"{THOUGHT}<|channel|>final<|message|>You, é."
    harmony[:] = [*tokens_of(text), model.config.eos_token_ids[0]]
    params = SamplingParams(temperature=0, max_tokens=100, stop=stop)
    *events, finished, _ = said(generate(model, ["Who?"], params), model.tokenizer)
    assert "".join(event.text for event in events) == finished.text == "You, é."
    assert [event.token for event in events] == tokens_of(text)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
