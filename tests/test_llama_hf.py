# SPDX-License-Identifier: Apache-2.0
"""Logits of small random Llamas, step by step, against Hugging Face transformers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tvm_pagedkv.models import LlamaModel  # noqa: E402

# float32 against float32: another order of summation through a few layers.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}
VOCAB_SIZE = 203
PAGE_SIZE = 4

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
}
CONFIGS = {
    "gqa-tied": {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "mha-untied-bias-linear": {
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    },
    "llama3-scaling": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral-window": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 7,
    },
    "mistral-yarn": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


class Pair:
    """The same weights in both worlds."""

    def __init__(self, folder, fields):
        torch.manual_seed(0)
        is_mistral = "sliding_window" in fields
        make = transformers.MistralConfig if is_mistral else transformers.LlamaConfig
        config = make(**COMMON, **fields)
        self.theirs = transformers.AutoModelForCausalLM.from_config(config).eval().float()
        self.theirs.save_pretrained(folder)
        _write_tokenizer(folder)
        self.ours = LlamaModel.from_pretrained(folder, page_size=PAGE_SIZE)

    def expected(self, tokens) -> np.ndarray:
        """Logits of every position of a sequence: [n, vocab]."""
        with torch.no_grad():
            return self.theirs(torch.tensor([list(tokens)])).logits[0].numpy()

    def cache(self):
        return self.ours.create_cache(6, 256, 64)


def _write_tokenizer(folder) -> None:
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])


def _tokens(seed: int, *lengths: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB_SIZE, length) for length in lengths]


def _close(found, expected) -> None:
    np.testing.assert_allclose(found, expected, **TOLERANCE)


@pytest.mark.parametrize("seed", [0])
def test_prefill_then_decode(pair, seed):
    (tokens,) = _tokens(seed, 41)
    expected = pair.expected(tokens)
    cache = pair.cache()
    cache.add_sequence(0)
    _close(pair.ours.prefill(cache, [0], [tokens[:37]])[0], expected[36])
    for position in range(37, 41):
        logits = pair.ours.decode(cache, [0], [tokens[position]])
        _close(logits[0], expected[position])


@pytest.mark.parametrize("seed", [1])
def test_chunked_prefill_gives_every_row(pair, seed):
    (tokens,) = _tokens(seed, 50)
    cache = pair.cache()
    cache.add_sequence(0)
    rows = [
        pair.ours.logits(cache, [0], [chunk])[0] for chunk in np.split(tokens, [1, 4, 9, 10, 33])
    ]
    _close(np.concatenate(rows), pair.expected(tokens))


@pytest.mark.parametrize("seed", [2])
def test_batch_of_different_lengths(pair, seed):
    prompts = _tokens(seed, 1, 17, 6, 30)
    following = _tokens(seed + 100, 4)[0]
    cache = pair.cache()
    ids = [7, 0, 3, 5]
    for seq_id in ids:
        cache.add_sequence(seq_id)
    logits = pair.ours.prefill(cache, ids, prompts)
    for row, prompt in zip(logits, prompts, strict=True):
        _close(row, pair.expected(prompt)[-1])
    order = [2, 0, 3, 1]  # another order than in the prefill
    logits = pair.ours.decode(cache, [ids[i] for i in order], following[order])
    for row, i in zip(logits, order, strict=True):
        _close(row, pair.expected([*prompts[i], following[i]])[-1])


@pytest.mark.parametrize("seed", [3])
def test_forked_decode(pair, seed):
    prompt, first, second = _tokens(seed, 18, 3, 3)
    cache = pair.cache()
    cache.add_sequence(0)
    pair.ours.prefill(cache, [0], [prompt])
    cache.fork_sequence(0, 1)
    cache.fork_sequence(0, 2, 10)
    paths = {0: [*prompt, *first], 1: [*prompt, *second], 2: [*prompt[:10], *first]}
    for step in range(3):
        logits = pair.ours.decode(cache, [1, 2, 0], [second[step], first[step], first[step]])
        for row, seq_id in zip(logits, [1, 2, 0], strict=True):
            path = paths[seq_id]
            _close(row, pair.expected(path)[len(path) - 3 + step])
    cache.check_integrity()


def test_other_dtypes_follow(tmp_path):
    torch.manual_seed(0)
    fields = COMMON | CONFIGS["gqa-tied"] | {"initializer_range": 0.1}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval()
    theirs.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _write_tokenizer(tmp_path)
    (tokens,) = _tokens(4, 20)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    for dtype, tolerance in (("float32", 1e-5), ("float16", 0.01), ("bfloat16", 0.05)):
        model = LlamaModel.from_pretrained(tmp_path, dtype, page_size=PAGE_SIZE)
        cache = model.create_cache(1, 64, 64)
        cache.add_sequence(0)
        found = model.logits(cache, [0], [tokens])[0]
        error = np.abs(found - expected).max() / np.abs(expected).max()
        assert error < tolerance, (dtype, error)
