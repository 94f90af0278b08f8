# SPDX-License-Identifier: Apache-2.0
"""Conversations: every answer is that of a cold run, whatever was reused, stopped or resumed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("jinja2")

from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tvm_pagedkv.config import PrefixCacheConfig
from tvm_pagedkv_lm import (
    ContextFullError,
    Conversation,
    DecoderModel,
    FinishedEvent,
    SamplingParams,
    encode_chat,
    generate,
    load_session,
    save_session,
)
from tvm_pagedkv_lm.model.source import TINY
from tvm_pagedkv_lm.text.chat import ChatTemplate

from ...support.emulators.dict_store import DictStore
from ..text.test_models_chat import directory_with

# The text of a turn is the beginning of the text of the next one.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

MESSAGES = ["The with statement", "A list is", "The yield expression", "x", "More"]
SHORT = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.7, max_tokens=24, seed=5)


@pytest.fixture(scope="module", params=["template", "continues"])
def folder(request, tmp_path_factory) -> Path:
    """The included model, with a chat template and without."""
    if request.param == "continues":
        return TINY
    return directory_with(tmp_path_factory.mktemp("chat"), TEMPLATE)


@pytest.fixture(scope="module")
def model(folder) -> DecoderModel:
    return DecoderModel.from_pretrained(folder)


def say(conversation: Conversation, *messages: str) -> list[str]:
    return ["".join(conversation.reply(message)) for message in messages]


@pytest.mark.parametrize("params", [SHORT, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_turns_are_reused_and_change_nothing(model, params, num_drafts):
    warm = Conversation(model, params, num_speculative_tokens=num_drafts)
    cold = Conversation(model, params, prefix_cache=False)
    before = 0
    for message in MESSAGES:
        assert say(warm, message) == say(cold, message)
        statistics = warm.last_turn.statistics
        # All but the last token of the turns before, and what a template ends with.
        assert statistics.reused_tokens >= max(0, before - 3)
        assert cold.last_turn.statistics.reused_tokens == 0
        assert warm.last_turn.first_token_seconds > 0
        before = warm.num_tokens()
        warm.cache.check_integrity()
        assert len(warm.cache) == 0
    assert warm.messages == cold.messages and warm.tokens == cold.tokens
    assert [each["content"] for each in warm.messages[::2]] == MESSAGES


def test_tiers_keep_turns_for_later_conversations(model):
    values: dict[bytes, bytes] = {}
    expected = say(Conversation(model, SHORT, prefix_cache=False), *MESSAGES[:3])
    for num_conversations in range(2):
        store = DictStore(values)
        tiers = PrefixCacheConfig(store=store, model_id="m", lookup_timeout=60.0)
        conversation = Conversation(model, SHORT, prefix_cache=tiers)
        assert say(conversation, *MESSAGES[:3]) == expected
        turn = conversation.last_turn.statistics
        reused = turn.reused_by_tier["store"]
        assert (reused > 0) == (num_conversations > 0)
        assert not store.closed.is_set() and conversation.close() and store.closed.is_set()
        assert len(values) >= turn.prompt_tokens // 16
        say(conversation, MESSAGES[3])  # goes on without the store
    assert Conversation(model, SHORT).close()


def test_an_answer_is_what_generate_says(model):
    conversation = Conversation(model, SHORT, system="S" if model.chat_template else None)
    say(conversation, *MESSAGES[:2])
    if model.chat_template is None:
        prompt = [
            *conversation.tokens,
            *model.tokenizer.encode("\nx", add_special_tokens=False).ids,
        ]
    else:
        system = {"role": "system", "content": "S"}
        user = {"role": "user", "content": "x"}
        prompt = encode_chat(model, [system, *conversation.messages, user])
    *_, finished, _ = generate(model, [prompt], SHORT)
    assert isinstance(finished, FinishedEvent)
    assert say(conversation, "x") == [finished.text]
    assert conversation.tokens == [*prompt, *finished.tokens]


@pytest.mark.parametrize("num_pieces", [0, 1, 7])
def test_a_stopped_answer_is_kept(model, num_pieces):
    conversation = Conversation(model, SHORT)
    say(conversation, MESSAGES[0])
    answer = conversation.reply(MESSAGES[1])
    pieces = [next(answer) for _ in range(num_pieces)]
    answer.close()
    assert len(conversation.cache) == 0 and conversation.last_turn.finish_reason != "stop"
    assert len(conversation.messages) == (4 if num_pieces else 2)
    if num_pieces:
        assert conversation.messages[-1]["content"] == "".join(pieces)
        assert conversation.last_turn.finish_reason == "interrupted"
    (found,) = say(conversation, MESSAGES[2])
    assert conversation.last_turn.statistics.reused_tokens > 30
    cold = Conversation(model, SHORT, prefix_cache=False)
    cold.messages, cold.tokens = conversation.messages[:-2], []
    if model.chat_template is None:
        for index, message in enumerate(cold.messages):
            line = f"\n{message['content']}" if index and index % 2 == 0 else message["content"]
            cold.tokens += model.tokenizer.encode(line, add_special_tokens=index == 0).ids
    assert say(cold, MESSAGES[2]) == [found]


def test_an_interrupt_within_a_step(model, monkeypatch):
    conversation = Conversation(model, SHORT)
    original, calls = model.decode, []

    def decode(cache, *arguments):
        calls.append(cache)
        if len(calls) == 3:
            cache.begin_forward([cache.sequence_ids()[0]], [1])
            raise KeyboardInterrupt
        return original(cache, *arguments)

    monkeypatch.setattr(model, "decode", decode)
    with pytest.raises(KeyboardInterrupt):
        say(conversation, MESSAGES[0])
    monkeypatch.undo()
    say(conversation, MESSAGES[1])
    conversation.cache.check_integrity()
    assert len(conversation.cache) == 0


def test_a_full_context(model, monkeypatch):
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=()))
    conversation = Conversation(model, SHORT, max_total_tokens=100)
    say(conversation, "x")
    assert conversation.last_turn.finish_reason == "length" and conversation.num_tokens() < 60
    conversation.params = replace(SHORT, max_tokens=1000)
    say(conversation, "x")
    assert conversation.last_turn.finish_reason == "context"
    assert conversation.num_tokens() == 100
    messages = list(conversation.messages)
    with pytest.raises(ContextFullError, match=r"has 1\d\d tokens, and at most 99 leave room"):
        conversation.reply("y")
    assert conversation.messages == messages
    assert conversation.trim()
    assert conversation.messages == messages[-2:] and 0 < conversation.num_tokens() < 100
    conversation.reset()
    assert not conversation.trim() and conversation.num_tokens() == 0
    say(conversation, "y")


def test_a_refused_trim_drops_nothing(model, monkeypatch):
    conversation = Conversation(model, SHORT)
    say(conversation, "x", "y")
    before = (list(conversation.messages), list(conversation.tokens))
    refusing = ChatTemplate("{{ raise_exception('too few turns') }}")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="too few turns"):
        patch.setattr(model, "chat_template", refusing)
        conversation.trim()
    assert (conversation.messages, conversation.tokens) == before


def test_mistakes(model):
    conversation = Conversation(model, SHORT)
    with pytest.raises(ValueError, match="the message is empty"):
        conversation.reply(" ")
    with pytest.raises(ValueError, match="one answer per message, got n = 2"):
        Conversation(model, SamplingParams(n=2))
    for number in (0, 1, 513):
        with pytest.raises(ValueError, match=f"from 2 to the model's context, 512, got {number}"):
            Conversation(model, max_total_tokens=number)
    if model.chat_template is None:
        with pytest.raises(ValueError, match="takes no system message"):
            Conversation(model, system="x")


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_checkpoint", "kv_dtype"), [(False, None), (True, None), (True, "int8")]
)
def test_resumed_as_if_it_had_never_ended(folder, tmp_path, has_checkpoint, kv_dtype):
    model = DecoderModel.from_pretrained(folder, kv_dtype=kv_dtype)
    one = Conversation(model, SAMPLED)
    say(one, *MESSAGES[:3])
    files = {"model": "m", "checkpoint": tmp_path / "pages" if has_checkpoint else None}
    save_session(one, tmp_path / "chat.json", **files)
    assert os.stat(tmp_path / "chat.json").st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 1 + has_checkpoint
    other = Conversation(model, SAMPLED)
    assert load_session(other, tmp_path / "chat.json", **files) is None
    other.cache.check_integrity()
    assert other.messages == one.messages and other.tokens == one.tokens
    assert say(other, *MESSAGES[3:]) == say(one, *MESSAGES[3:])
    again = Conversation(model, SAMPLED)
    load_session(again, tmp_path / "chat.json", **files)
    say(again, MESSAGES[3])
    num_reused = again.last_turn.statistics.reused_tokens
    assert num_reused >= len(other.tokens) // 3 if has_checkpoint else num_reused == 0


def test_checkpoints_of_something_else_are_not_used(model, tmp_path):
    session, pages = tmp_path / "chat.json", tmp_path / "pages"
    one = Conversation(model, SHORT)
    say(one, *MESSAGES[:2])
    save_session(one, session, model="m", checkpoint=pages)
    text, saved = session.read_text(), pages.read_bytes()
    expected = say(one, MESSAGES[2])

    def check(message: str, other_model=model, **options) -> None:
        other = Conversation(other_model, SHORT, **options)
        refusal = load_session(other, session, model="m", checkpoint=pages)
        assert refusal is not None and message in refusal and "\n" not in refusal
        other.cache.check_integrity()
        assert len(other.cache) == 0
        answers = say(other, MESSAGES[2])
        assert answers == expected or other_model is not model
        assert other.last_turn.statistics.reused_tokens == 0

    assert load_session(Conversation(model, SHORT), session, model="m", checkpoint=pages) is None
    fields = json.loads(text)
    fields["checkpoint"]["precision"] = "float16 short"
    session.write_text(json.dumps(fields))
    check("it is of a model in other types")
    fields = json.loads(text)
    for num_tokens in (-1, None, fields["checkpoint"]["num_tokens"] - 1):
        fields["checkpoint"]["num_tokens"] = num_tokens
        session.write_text(json.dumps(fields))
        check("the session does not have its tokens")
    session.write_text(text)
    check("layout", DecoderModel.from_pretrained(TINY, page_size=8))
    for damaged, message in (
        (saved[:-100], ""),
        (saved[:50] + b"x" + saved[51:], "it was not written with this session"),
        (b"", "it was not written with this session"),
        (b"\xff" * 100, "it is not a checkpoint"),
    ):
        pages.write_bytes(damaged)
        check(message)
    pages.unlink()
    check("No such file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has no conversation"),
        ({"format": "other"}, "has no conversation"),
        ({"version": 1}, "has version 1, expected 2"),
        ({"messages": {}}, "messages must be of user and assistant in turn"),
        ({"messages": [{"role": "user", "content": "x"}]}, "the last message has no answer"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages must be of user"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages must be of user"),
        ({"system": 1}, "system must be a text, got 1"),
        ({"tokens": None}, "tokens must be a list"),
        ({"tokens": [0.5]}, "tokens must be integers"),
        ({"tokens": [258]}, "token id 258 at index 0"),
    ],
    ids=str,
)
def test_files_that_are_no_sessions(model, tmp_path, change, message):
    file = tmp_path / "chat.json"
    conversation = Conversation(model, SHORT)
    say(conversation, "x")
    save_session(conversation, file)
    if isinstance(change, str):
        file.write_text(change)
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    messages = list(conversation.messages)
    with pytest.raises(ValueError, match=message):
        load_session(conversation, file)
    assert conversation.messages == messages
    with pytest.raises(OSError):
        load_session(conversation, tmp_path / "none")


def other_weights(folder: Path) -> None:
    """Replace the weights in place: a file of the same size and time with another tensor."""
    file = folder / "model.safetensors"
    info, tensors = file.stat(), load_file(file)
    name = "model.layers.3.post_attention_layernorm.weight"
    with safe_open(file, framework="numpy") as stored:
        metadata = stored.metadata()
    save_file(tensors | {name: tensors[name][::-1].copy()}, file, metadata)
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert file.stat().st_size == info.st_size


@pytest.mark.parametrize("change", ["weights", "tokenizer", "template", "configuration"])
def test_sessions_of_another_model_are_refused(folder, tmp_path, change):
    changed = Path(shutil.copytree(folder, tmp_path / "other"))
    if change == "weights":
        other_weights(changed)
    elif change == "tokenizer":
        tokenizer = changed / "tokenizer.json"
        tokenizer.write_text(
            tokenizer.read_text().replace('"normalized": false', '"normalized": true')
        )
    elif change == "template":
        (changed / "chat_template.jinja").write_text(TEMPLATE + " ")
    else:
        config = changed / "config.json"
        fields = json.loads(config.read_text())
        config.write_text(json.dumps(fields | {"rms_norm_eps": 1e-4}))
    one = Conversation(DecoderModel.from_pretrained(folder), SHORT)
    say(one, *MESSAGES[:2])
    session, pages = tmp_path / "chat.json", tmp_path / "pages"
    save_session(one, session, checkpoint=pages)
    other = Conversation(DecoderModel.from_pretrained(changed), SHORT)
    say(other, MESSAGES[2])
    before = list(other.messages), list(other.tokens)
    with pytest.raises(ValueError, match="is of a conversation with another model: its weights"):
        load_session(other, session, checkpoint=pages)
    assert (other.messages, other.tokens) == before
    copy = DecoderModel.from_pretrained(shutil.copytree(folder, tmp_path / "copy"), "float16")
    again = Conversation(copy, SHORT)  # the same model in another type goes on without the pages
    refusal = load_session(again, session, checkpoint=pages)
    assert "it is of a model in other types" in refusal and again.messages == one.messages


def test_pages_in_stores_are_those_of_the_model(tmp_path):
    """Weights that were replaced in place, under one name: nothing of the older ones is found."""
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    values: dict[bytes, bytes] = {}

    def text_of(model) -> tuple[str, int]:
        tiers = PrefixCacheConfig(store=DictStore(values), model_id="m", lookup_timeout=60.0)
        conversation = Conversation(model, SHORT, prefix_cache=tiers)
        (text,) = say(conversation, MESSAGES[0] * 4)
        conversation.close()
        return text, conversation.last_turn.statistics.reused_by_tier["store"]

    expected, reused = text_of(DecoderModel.from_pretrained(folder))
    assert reused == 0
    text, reused = text_of(DecoderModel.from_pretrained(folder))
    assert text == expected and reused > 0
    other_weights(folder)
    other = DecoderModel.from_pretrained(folder)
    (cold,) = say(Conversation(other, SHORT), MESSAGES[0] * 4)
    assert text_of(other) == (cold, 0)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
