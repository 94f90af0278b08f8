# SPDX-License-Identifier: Apache-2.0
"""What of a prompt's text is read: BOS once, files of several editors, and the ends of turns."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("jinja2")

from tokenizers import Tokenizer, processors

from tvm_pagedkv_lm import Conversation, DecoderModel, SamplingParams, encode_text, generate
from tvm_pagedkv_lm.cli.command import main
from tvm_pagedkv_lm.model.source import TINY

from .test_models_chat import TINY_TEMPLATE, directory_with

GREEDY = SamplingParams(temperature=0, max_tokens=12)
BOS, EOS = 256, 257


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel.from_pretrained(TINY)


def test_a_text_with_bos_gets_no_second_one(model):
    plain = model.tokenizer.encode("A list").ids
    assert plain[0] == BOS and BOS not in plain[1:]
    assert encode_text(model.tokenizer, "A list") == plain
    assert encode_text(model.tokenizer, "<bos>A list") == plain
    assert encode_text(model.tokenizer, "<bos>") == encode_text(model.tokenizer, "") == [BOS]
    assert encode_text(model.tokenizer, "<bos><bos>A")[:3] == [BOS, BOS, ord("A")]  # as asked for
    assert encode_text(model.tokenizer, "<eos>A") == [BOS, EOS, ord("A")]
    with_ends = Tokenizer.from_str(model.tokenizer.to_str())
    used = [("<bos>", BOS), ("<eos>", EOS)]
    with_ends.post_processor = processors.TemplateProcessing("<bos> $A <eos>", None, used)
    assert encode_text(with_ends, "<bos>A<eos>") == [BOS, ord("A"), EOS, EOS]
    without = Tokenizer.from_str(model.tokenizer.to_str())
    without.post_processor = processors.TemplateProcessing("$A", None, [])
    assert encode_text(without, "<bos><bos>") == [BOS, BOS]
    assert encode_text(without, "aa") == [ord("a")] * 2 and encode_text(without, "") == []


def test_prompts_and_conversations_begin_with_one_bos(model):
    events = [[*generate(model, [text], GREEDY)][:-1] for text in ("A list", "<bos>A list")]
    assert events[0] == events[1]
    conversations = Conversation(model, GREEDY), Conversation(model, GREEDY)
    for each, text in zip(conversations, ("A list", "<bos>A list"), strict=True):
        "".join(each.reply(text))
    assert conversations[0].tokens == conversations[1].tokens


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_files_of_prompts_may_begin_with_a_byte_order_mark(mark, tmp_path, capfd):
    file = tmp_path / "prompt.txt"
    file.write_bytes(mark + b"A list is")
    arguments = ["generate", "--model", "tiny", "--temperature", "0", "--max-tokens", "12"]
    assert main([*arguments, "A list is"]) == 0
    expected = capfd.readouterr().out
    assert main([*arguments, "--file", str(file)]) == 0
    assert capfd.readouterr().out == expected


def test_line_ends_of_a_file_stay(tmp_path, capfd):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"a\r\nb")
    assert main(["generate", "--model", "tiny", "--file", str(file), "--max-tokens", "1"]) == 0
    assert capfd.readouterr().out.startswith("a\r\nb")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "latin-1"])
def test_files_in_other_encodings(encoding, tmp_path, capfd):
    file = tmp_path / "prompt.txt"
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    file.write_bytes(f"{mark}\u00e9".encode(encoding))
    assert main(["generate", "--model", "tiny", "--file", str(file)]) == 2
    reason = "byte 0xe9 at offset 0" if encoding == "latin-1" else "it is in UTF-16 or UTF-32"
    assert f"prompt file {file} is not UTF-8 text: {reason}" in capfd.readouterr().err


def test_the_end_token_of_the_tokenizer_ends_a_turn(tmp_path):
    """A fine-tune may name the end of a turn in tokenizer_config.json alone."""
    model = DecoderModel.from_pretrained(TINY)
    (tokens,) = [e.tokens for e in generate(model, ["A list"], GREEDY) if hasattr(e, "tokens")]
    letter = next(token for token in tokens if 32 < token < 127)
    folder = directory_with(tmp_path, TINY_TEMPLATE, eos_token=chr(letter))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": None}))
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    tuned = DecoderModel.from_pretrained(folder)
    assert tuned.config.eos_token_ids == (3, letter) and model.config.eos_token_ids == (EOS,)
    (end,) = [e for e in generate(tuned, ["A list"], GREEDY) if hasattr(e, "finish_reason")]
    assert end.finish_reason == "stop" and end.tokens == tokens[: tokens.index(letter)]
    chat = Conversation(tuned, GREEDY)
    "".join(chat.reply("A list"))
    assert letter not in chat.tokens[-5:]


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_folders_without_tokenizer_json(name, tmp_path):
    folder = directory_with(tmp_path, TINY_TEMPLATE)
    (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=f"no tokenizer.json, only {name}; transformers"):
        DecoderModel.from_pretrained(folder)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
