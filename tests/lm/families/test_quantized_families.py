# SPDX-License-Identifier: Apache-2.0
"""Families with weights of 8 or 4 bits, against the same models with those numbers as floats."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tvm_pagedkv_lm import DecoderModel
from tvm_pagedkv_lm.formats.weight_formats import FORMATS, QuantizedRows
from tvm_pagedkv_lm.model import decoder_weights as weights

from ...support.cases.models.model_cases import PAGE_SIZE, random_tokens, write_checkpoint
from .test_gemma_families import GEMMA4
from .test_hybrid_families import FAMILIES as HYBRIDS
from .test_latent_families import FAMILIES as LATENT
from .test_moe_families import FAMILIES as EXPERTS

# Widths of 32 features, and few of what makes routers and recurrences sensitive to rounding.
CALM = {"initializer_range": 0.15, "tie_word_embeddings": True}
CASES = {
    "qwen3_moe": ("qwen3_moe", EXPERTS["qwen3_moe"] | {"intermediate_size": 96}),
    "mixtral": ("mixtral", EXPERTS["mixtral"] | {"intermediate_size": 96}),
    "llama4": ("llama4_text", EXPERTS["llama4_text"] | {"intermediate_size_mlp": 96}),
    "glm4_moe": ("glm4_moe", EXPERTS["glm4_moe"] | {"intermediate_size": 96}),
    "granite, with multipliers": (
        "granitemoehybrid",
        HYBRIDS["granitemoehybrid"] | {"shared_intermediate_size": 96},
    ),
    "qwen3_next": ("qwen3_next", HYBRIDS["qwen3_next"]),
    "gemma4": ("gemma4_text", GEMMA4 | {"hidden_size": 64, "intermediate_size": 96}),
    "deepseek_v3": ("deepseek_v3", LATENT["deepseek_v3"]),
}


def logits(loaded: DecoderModel, tokens) -> np.ndarray:
    cache = loaded.create_cache(1, 64, 64)
    cache.add_sequence(0)
    return np.concatenate([loaded.logits(cache, [0], [x])[0] for x in np.split(tokens, [17, 18])])


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["int4", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_rounded_weights(case, choice, tmp_path, monkeypatch):
    family, fields = CASES[case]
    write_checkpoint(tmp_path, family, fields | CALM)
    (tokens,) = random_tokens(3, 24)
    how = {"page_size": PAGE_SIZE}
    found = DecoderModel.from_pretrained(tmp_path, "float32", weights=choice, **how)
    formats = {name: FORMATS[format] for name, format in found.options.formats}
    names = " ".join(formats)
    assert found.config.tied_embeddings and formats["lm_head.weight"] == formats["embed_tokens"]
    assert formats["embed_tokens"].name == "int8" and "mlp" in names
    read = weights._read

    def read_rounded(checkpoint, part, format):
        assert format is None
        numbers = read(checkpoint, part, rounded_to.get(part))
        return numbers.values() if isinstance(numbers, QuantizedRows) else numbers

    sources = weights.weights(found.config, found.options.layers_of(found.config))
    rounded_to = {
        part: formats[name]  # rows of one tensor may have several
        for name, source in sources
        if name in formats
        for part in source.parts
    }
    monkeypatch.setattr(weights, "_read", read_rounded)
    exact = DecoderModel.from_pretrained(tmp_path, "float32", weights="float", **how)
    assert not exact.options.formats
    expected = logits(exact, tokens)
    errors = np.abs(logits(found, tokens) - expected).max(-1) / expected.std()
    # Activations have 16 bits; a row whose router is undecided may choose other experts.
    assert np.median(errors) < 1e-2 and (errors < 3e-2).mean() > 0.8, errors


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
