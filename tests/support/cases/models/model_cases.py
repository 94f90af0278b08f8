# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints, and steps whose logits must be those of Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from tvm_pagedkv_lm import DecoderModel

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
    # Some families have tokens of their own beyond this vocabulary.
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_checkpoint(folder: Path, model_type: str, fields: dict, **save):
    """Write a checkpoint of random weights; the model of transformers that wrote it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **COMMON | fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("_bias"):  # which begin as zeros and ones
            parameter.data += torch.randn_like(parameter) * 0.2
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):  # begin as zeros and ones
            buffer += torch.randn_like(buffer) * 0.2
    model.save_pretrained(folder, **save)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """One word for each token."""
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def random_tokens(seed: int, *lengths: int) -> list[np.ndarray]:
    """Token ids of several texts."""
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB_SIZE, length) for length in lengths]


def assert_close(found, expected) -> None:
    """Compare logits."""
    np.testing.assert_allclose(found, expected, **TOLERANCE)


class Pair:
    """The same weights in both worlds."""

    def __init__(self, folder: Path, model_type: str, fields: dict):
        self.folder = folder
        self.theirs = write_checkpoint(folder, model_type, fields)
        self.ours = DecoderModel.from_pretrained(folder, "float32", page_size=PAGE_SIZE)

    def expected(self, tokens) -> np.ndarray:
        """Logits of every position of a sequence: [n, vocab]."""
        with torch.no_grad():
            return self.theirs(torch.tensor([list(tokens)])).logits[0].numpy()

    def cache(self, **options):
        return self.ours.create_cache(6, 256, 64, **options)


# --- steps --------------------------------------------------------------------------------------


def check_prefill_then_decode(pair: Pair, seed: int) -> None:
    """A prompt that is longer than the windows, then single tokens."""
    (tokens,) = random_tokens(seed, 41)
    expected = pair.expected(tokens)
    cache = pair.cache()
    cache.add_sequence(0)
    assert_close(pair.ours.prefill(cache, [0], [tokens[:37]])[0], expected[36])
    for position in range(37, 41):
        logits = pair.ours.decode(cache, [0], [tokens[position]])
        assert_close(logits[0], expected[position])


def check_chunks(pair: Pair, seed: int) -> None:
    """Chunks that end within, at and beyond the windows; the logits of every row."""
    (tokens,) = random_tokens(seed, 50)
    cache = pair.cache(use_long_rope_factors=True)
    cache.add_sequence(0)
    rows = [
        pair.ours.logits(cache, [0], [chunk])[0] for chunk in np.split(tokens, [1, 4, 9, 10, 33])
    ]
    assert_close(np.concatenate(rows), pair.expected(tokens))


def check_batch(pair: Pair, seed: int) -> None:
    """Sequences of different lengths, decoded in another order than they were prefilled in."""
    prompts = random_tokens(seed, 1, 17, 6, 30)
    following = random_tokens(seed + 100, 4)[0]
    cache = pair.cache()
    ids = [7, 0, 3, 5]
    for seq_id in ids:
        cache.add_sequence(seq_id)
    logits = pair.ours.prefill(cache, ids, prompts)
    for row, prompt in zip(logits, prompts, strict=True):
        assert_close(row, pair.expected(prompt)[-1])
    order = [2, 0, 3, 1]
    logits = pair.ours.decode(cache, [ids[i] for i in order], following[order])
    for row, i in zip(logits, order, strict=True):
        assert_close(row, pair.expected([*prompts[i], following[i]])[-1])


def check_forks(pair: Pair, seed: int) -> None:
    """Forks at the end and within a prompt, decoded together."""
    prompt, first, second = random_tokens(seed, 18, 3, 3)
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
            assert_close(row, pair.expected(path)[len(path) - 3 + step])
    cache.check_integrity()


def check_pops(pair: Pair, seed: int) -> None:
    """Within a page, a whole page, and all that a step has appended."""
    tokens, other = random_tokens(seed + 1, 30, 9)
    cache = pair.cache()
    cache.add_sequence(0)
    pair.ours.prefill(cache, [0], [tokens])
    for popped, appended in ((3, 2), (11, 1), (1, 5)):
        length = cache.sequence_length(0) - popped
        cache.pop_n(0, popped)
        tokens = [*tokens[:length], *other[:appended]]
        logits = pair.ours.logits(cache, [0], [other[:appended]])[0]
        assert_close(logits, pair.expected(tokens)[length:])
    cache.check_integrity()


CHECKS = {
    "prefill, decode": check_prefill_then_decode,
    "chunks": check_chunks,
    "batch": check_batch,
    "forks": check_forks,
    "pops": check_pops,
}
