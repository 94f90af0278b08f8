# SPDX-License-Identifier: Apache-2.0
"""Tokens that files beside tokenizer.json name: the ids of a text are those of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, normalizers, processors  # noqa: E402

from tvm_pagedkv_lm.model.source import TINY, HuggingFaceModel  # noqa: E402

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
BOS_EOS = {"bos_token": "<bos>", "eos_token": "<eos>"}
TEXTS = (
    "a <|x|> b<|y|>  c", "<|x|><|y|><|x|>", " \n<|y|> \n<|x|>z", "A<|Y|>\u00e9<z>z<z> <zz>",
    "<bos>a<eos>", "<bos> <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "",
)  # fmt: skip


def token(content: str, **flags) -> dict:
    names = ("lstrip", "normalized", "rstrip", "single_word", "special")
    return dict.fromkeys(names, False) | flags | {"content": content}


def typed(content: str, **flags) -> dict:
    return {"__type": "AddedToken", **token(content, **flags)}


# Files beside tokenizer.json, as models of several families and their fine-tunes have them.
FOLDERS: dict[str, dict[str, dict]] = {
    "listed by id": {CONFIG: {"added_tokens_decoder": {
        "256": token("<bos>", special=True), "257": token("<eos>", special=True),
        "259": token("<|y|>"), "258": token("<|x|>", special=True),
        "260": token("<|im_start|>", special=True), "261": token("<|im_end|>", special=True)}}},
    "strips": {CONFIG: {"added_tokens_decoder": {
        "258": token("<|x|>", special=True, lstrip=True, rstrip=True),
        "259": token("<|y|>", rstrip=True), "260": token("<z>", single_word=True)}}},
    "strips with spaces": {CONFIG: {"added_tokens_decoder": {
        "258": token("<|y|>", lstrip=True, normalized=True)}}},
    "other flags of tokens that there are": {CONFIG: {"added_tokens_decoder": {
        "256": token("<bos>", special=True, rstrip=True), "257": token("<eos>", lstrip=True)}}},
    "additional": {CONFIG: {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}},
    "additional with flags": {CONFIG: {
        "additional_special_tokens": [typed("<|x|>", rstrip=True, special=True), "<|y|>"]}},
    "extra": {CONFIG: {"extra_special_tokens": ["<|x|>"], "additional_special_tokens": ["<|y|>"]}},
    "extra by name": {CONFIG: {"extra_special_tokens": {"image_token": "<|x|>", "b": "<|y|>"}}},
    "names of the model": {CONFIG: {"image_token": "<|x|>", "boi_token": typed("<|y|>"),
                                    "add_bos_token": True, "no_token": None}},
    "named": {CONFIG: {"eos_token": "<|im_end|>", "pad_token": typed("<|x|>", special=True),
                       "unk_token": None}},
    "a vocabulary's token is named": {CONFIG: {"pad_token": "z", "eos_token": typed("c")}},
    "named and listed": {CONFIG: {
        "eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "added_tokens_decoder": {"258": token("<|im_end|>"), "259": token("<|y|>", special=True)}}},
    "added tokens": {ADDED: {"<|y|>": 259, "<|x|>": 258, "<z>": 260}},
    "added tokens of a fine-tune": {
        ADDED: {"<|im_end|>": 259, "<|im_start|>": 258, "<z>": 260},
        MAP: {"eos_token": token("<|im_end|>"), "pad_token": "<|im_end|>",
              "additional_special_tokens": ["<|im_start|>"]},
        CONFIG: {"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"}},
    "map": {MAP: {"eos_token": token("<|x|>", rstrip=True), "extra_special_tokens": ["<|y|>"]}},
    "a list makes older files void": {
        CONFIG: {"added_tokens_decoder": {"258": token("<|x|>", special=True)}},
        ADDED: {"<|y|>": 258}, MAP: {"pad_token": "<|im_end|>"}},
    "an empty list": {CONFIG: {"added_tokens_decoder": {}}, ADDED: {"<|y|>": 258}},
    "no BOS by the configuration": {CONFIG: {"add_bos_token": False, "add_eos_token": True}},
    "what only decoding has": {CONFIG: {"clean_up_tokenization_spaces": True,
                                        "model_max_length": 1e30, "add_prefix_space": True}},
}  # fmt: skip


def write(tmp_path: Path, files: dict[str, dict], tokenizer=None, model_type="llama") -> Path:
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    fields = {CONFIG: BOS_EOS} if tokenizer is None else {CONFIG: {}}
    for name, content in (fields | files).items():
        own = fields.get(name, {})
        (folder / name).write_text(json.dumps(own | content))
    return folder


def check(folder: Path, texts) -> None:
    """Compare ids and the special tokens with those of transformers."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = HuggingFaceModel(folder).tokenizer()
    for text in texts:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
        without = ours.encode(text, add_special_tokens=False).ids
        assert without == theirs(text, add_special_tokens=False)["input_ids"]
    added = ours.get_added_tokens_decoder()
    assert {i: (str(t), t.special) for i, t in added.items()} == {
        i: (str(t), t.special) for i, t in theirs.added_tokens_decoder.items()
    }


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_as_transformers(files, tmp_path):
    check(write(tmp_path, files), TEXTS)


@pytest.mark.parametrize("single", [None, "$A", "<bos> $A", "$A <eos>"])
@pytest.mark.parametrize("adds", [True, False])
def test_bos_as_tokenizer_json_says(single, adds, tmp_path):
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    used = [("<bos>", 256), ("<eos>", 257)]
    if single is not None:
        tokenizer.post_processor = processors.TemplateProcessing(single, None, used)
    else:
        fields = json.loads(tokenizer.to_str()) | {"post_processor": None}
        tokenizer = Tokenizer.from_str(json.dumps(fields))
    fields = BOS_EOS | {"add_bos_token": adds, "add_eos_token": not adds}
    check(write(tmp_path, {CONFIG: fields}, tokenizer), TEXTS)


def sentence_piece() -> Tokenizer:
    """A tokenizer as Llama 2 has it, which puts a space before every part of a text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581"]
    pieces += [*"abcdehlorst", "\u2581h", "he", "\u2581t", "st", "lo", "\u2581\u2581"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("\u2581", "h"), ("h", "e"), ("\u2581", "t"), ("s", "t"), ("l", "o")]
    merges.append(("\u2581", "\u2581"))
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return tokenizer


@pytest.mark.parametrize("model_type", ["llama", "mistral", "phi3"])
@pytest.mark.parametrize("kind", ["LlamaTokenizer", "LlamaTokenizerFast", "Other", None])
@pytest.mark.parametrize(
    "fields",
    [{}, {"legacy": False}, {"legacy": True}, {"add_prefix_space": False}, {"legacy": None}],
    ids=str,
)
def test_spaces_of_llama_2(fields, kind, model_type, tmp_path):
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": kind}
    given = {name: value for name, value in names.items() if value is not None} | fields
    folder = write(tmp_path, {CONFIG: given}, sentence_piece(), model_type)
    texts = ("hello", "<s>[INST] hello [/INST] lo</s>", " hello", "a\n b", "</s> he</s>lo  st", "")
    check(folder, texts)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = HuggingFaceModel(folder).tokenizer()
    for text in texts:
        ids = ours.encode(text).ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_ids_that_the_files_do_not_agree_about(tmp_path):
    listed = {"300": token("<|x|>", special=True)}
    folder = write(tmp_path, {CONFIG: {"added_tokens_decoder": listed}})
    with pytest.warns(
        UserWarning, match="token '<|x|>' has the id 258, as in transformers; .* 300"
    ):
        check(folder, TEXTS)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (CONFIG, {"added_tokens_decoder": []}, "added_tokens_decoder must be an object"),
        (CONFIG, {"added_tokens_decoder": {"x": token("a")}}, "must have tokens by their ids"),
        (CONFIG, {"added_tokens_decoder": {"1": "a"}}, "must have tokens by their ids, got '1'"),
        (CONFIG, {"added_tokens_decoder": {"1": {}}}, "a token must be a text or an object"),
        (CONFIG, {"extra_special_tokens": [3]}, "a token must be a text or an object with one"),
        (ADDED, {"a": "1"}, "token 'a' must have an id, got '1'"),
    ],
    ids=str,
)
def test_damaged_files(file, content, message, tmp_path):
    folder = write(tmp_path, {file: content})
    with pytest.raises(ValueError, match=message) as caught:
        HuggingFaceModel(folder).tokenizer()
    assert str(folder) in str(caught.value)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
