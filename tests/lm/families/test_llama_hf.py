# SPDX-License-Identifier: Apache-2.0
"""Logits of small random Llamas, step by step, against Hugging Face transformers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tvm_pagedkv_lm import DecoderModel  # noqa: E402

from ...support.cases.models.model_cases import (  # noqa: E402
    CHECKS,
    PAGE_SIZE,
    Pair,
    random_tokens,
    write_checkpoint,
)
from ...support.harness.selections import all_slow_but  # noqa: E402

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


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    model_type = "mistral" if request.param.startswith("mistral") else "llama"
    return Pair(tmp_path_factory.mktemp(request.param), model_type, CONFIGS[request.param])


@pytest.mark.parametrize("check", all_slow_but(CHECKS, "chunks", "pops"))
@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_logits(pair, check, seed):
    CHECKS[check](pair, seed)


def test_other_dtypes_follow(tmp_path):
    theirs = write_checkpoint(tmp_path, "llama", CONFIGS["gqa-tied"] | {"initializer_range": 0.1})
    (tmp_path / "model.safetensors").unlink()
    theirs.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    (tokens,) = random_tokens(4, 20)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    for dtype, tolerance in (("float32", 1e-5), ("float16", 0.01), ("bfloat16", 0.05)):
        model = DecoderModel.from_pretrained(tmp_path, dtype, page_size=PAGE_SIZE)
        cache = model.create_cache(1, 64, 64)
        cache.add_sequence(0)
        found = model.logits(cache, [0], [tokens])[0]
        error = np.abs(found - expected).max() / np.abs(expected).max()
        assert error < tolerance, (dtype, error)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
