# SPDX-License-Identifier: Apache-2.0
"""Greedy texts of SmolLM2 beside llama.cpp, token by token.

Needs ``pip install llama-cpp-python``, which compiles for ten minutes, and the download of SmolLM2.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytestmark = pytest.mark.slow
llama_cpp = pytest.importorskip(
    "llama_cpp", reason="llama-cpp-python is not installed, which compiles for ten minutes"
)

from tvm_pagedkv_lm import DecoderModel, encode_chat  # noqa: E402
from tvm_pagedkv_lm.model import included  # noqa: E402

NUM_TOKENS = 64
PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that reverses a list.",
    "Once upon a time, in a village by the sea,",
    "The three most important rules of chess are",
)
NUM_CHATS = 3  # of these; the model continues the others
TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "Q4_K_M": 15}  # of llama.cpp's quantizer


class Text(NamedTuple):
    """A greedy text of llama.cpp, with its logits ``[NUM_TOKENS, vocab]`` before each token."""

    prompt: list[int]
    tokens: list[int]
    logits: np.ndarray


class Comparison(NamedTuple):
    """What a model says about the texts, given the same tokens before each position."""

    num_positions: int
    num_near_ties: int  # the two largest logits of llama.cpp differ by at most 0.05
    disagreements: list[tuple[float, str]]  # their distance there, and where
    error: float  # standard deviation of the logits

    @property
    def disagrees_at(self) -> float:
        """The largest distance of llama.cpp's two largest logits where the models disagree."""
        return max((distance for distance, _ in self.disagreements), default=0.0)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_PAGEDKV_MODELS", str(Path(__file__).parents[3] / ".pytest_cache/models"))
        try:
            return included.download_smollm2() / included._FILE
        except (RuntimeError, OSError) as error:
            pytest.skip(f"SmolLM2 cannot be downloaded: {str(error).splitlines()[0]}")


def converted(file: Path, name: str, folder: Path) -> Path:
    """Write a model with other types of tensors, as llama.cpp converts it."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize = TYPES[name], True
    out = folder / f"{name}.gguf"
    assert llama_cpp.llama_model_quantize(bytes(file), bytes(out), parameters) == 0
    return out


def greedy_texts(file: Path, prompts: list[list[int]]) -> list[Text]:
    """Generate with llama.cpp, whose cache holds float32."""
    llama = llama_cpp.Llama(
        str(file), n_ctx=512, n_batch=512, n_threads=1, n_threads_batch=1, type_k=0, type_v=0,
        flash_attn=False, verbose=False,
    )  # fmt: skip
    texts = []
    for prompt in prompts:
        llama.reset()
        tokens, rows, new = [], [], prompt
        while len(tokens) < NUM_TOKENS:
            llama.eval(new)
            pointer = llama_cpp.llama_get_logits(llama.ctx)
            rows.append(np.ctypeslib.as_array(pointer, (llama.n_vocab(),)).copy())
            tokens.append(int(rows[-1].argmax()))
            new = tokens[-1:]
        texts.append(Text(prompt, tokens, np.stack(rows)))
    llama.close()
    return texts


def compare(model: DecoderModel, texts: list[Text]) -> Comparison:
    """Compare the most likely tokens of all positions."""
    num_near_ties, disagreements, errors = 0, [], []
    for text in texts:
        cache = model.create_cache(1, 512)
        cache.add_sequence(0)
        rows = model.logits(cache, [0], [[*text.prompt, *text.tokens[:-1]]])[0]
        rows = rows[len(text.prompt) - 1 :]
        errors.append((rows - text.logits).ravel())
        top = np.sort(text.logits, axis=1)[:, -2:]
        distances = top[:, 1] - top[:, 0]
        num_near_ties += int((distances <= 0.05).sum())
        for i in np.flatnonzero(rows.argmax(axis=1) != text.tokens):
            theirs, ours = (
                model.tokenizer.decode([int(t)]) for t in (text.tokens[i], rows[i].argmax())
            )
            disagreements.append((float(distances[i]), f"token {i}: {theirs!r}, ours {ours!r}"))
    num_positions = len(texts) * NUM_TOKENS
    found = Comparison(num_positions, num_near_ties, disagreements, np.concatenate(errors).std())
    print(model.options.dtype, found)
    return found


def prompts_of(model: DecoderModel) -> list[list[int]]:
    chats = [[{"role": "user", "content": text}] for text in PROMPTS[:NUM_CHATS]]
    rest = [model.tokenizer.encode(text).ids for text in PROMPTS[NUM_CHATS:]]
    return [encode_chat(model, chat) for chat in chats] + rest


def test_tokens_of_prompts(smollm2):
    llama = llama_cpp.Llama(str(smollm2), vocab_only=True, verbose=False)
    model = DecoderModel.from_pretrained(smollm2)
    for text in (*PROMPTS, "naïve  日本語 🙂\n\n\t12345 it's", "<|im_start|>user\nx<|im_end|>"):
        ours = model.tokenizer.encode(text).ids
        assert ours == llama.tokenize(text.encode(), add_bos=False, special=True)


@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0", "Q4_K_M", "Q4_1"])
def test_greedy_texts(smollm2, name, tmp_path):
    file = smollm2 if name == "Q4_1" else converted(smollm2, name, tmp_path)
    model = DecoderModel.from_pretrained(file, "float32", weights="float")
    prompts = prompts_of(model)
    if name in ("F32", "F16"):
        texts = greedy_texts(file, prompts)
    else:  # llama.cpp rounds activations to eight bits for matrices of these types
        print("with activations in eight bits:")
        compare(model, greedy_texts(file, prompts))
        texts = greedy_texts(converted(file, "F32", tmp_path), prompts)
    found = compare(model, texts)
    assert found.disagrees_at <= 0.05
    assert found.error < (0.02 if name == "F16" else 1e-3)  # it rounds activations to float16


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
