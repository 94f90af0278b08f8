# SPDX-License-Identifier: Apache-2.0
"""The type in which a model runs if nobody names one, and what exceeds the range of float16."""

from __future__ import annotations

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from tir_kernels.spec import VectorTarget  # noqa: E402
from tvm_pagedkv_lm import DecoderModel, ParallelModel  # noqa: E402
from tvm_pagedkv_lm.config.default_dtype import default_dtype  # noqa: E402
from tvm_pagedkv_lm.families.registry import FAMILIES, config_from_fields  # noqa: E402
from tvm_pagedkv_lm.model.source import open_model  # noqa: E402

from ...support.cases.models.gguf_cases import write_gguf  # noqa: E402
from ...support.cases.models.model_cases import random_tokens, write_checkpoint  # noqa: E402

SHAPE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 300,
}
OF_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
OF_FAMILIES = {
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "Gemma3nForConditionalGeneration": {"num_kv_shared_layers": 0},
    "DeepseekV2ForCausalLM": OF_EXPERTS,
    "DeepseekV3ForCausalLM": OF_EXPERTS,
    "Glm4MoeLiteForCausalLM": OF_EXPERTS,
    "Mistral4ForCausalLM": OF_EXPERTS,
    "DeepseekV32ForCausalLM": OF_EXPERTS | {"q_lora_rank": 32},
    "GlmMoeDsaForCausalLM": OF_EXPERTS | {"q_lora_rank": 32},
    "MiniMaxM3VLForCausalLM": {"index_n_heads": 2},
    "MiniMaxM3SparseForConditionalGeneration": {"index_n_heads": 2},
    "KimiLinearForCausalLM": {"num_experts": 8, "num_experts_per_token": 2},
    "Mamba2ForCausalLM": {"num_heads": 8, "state_size": 24},
    "GraniteMoeHybridForCausalLM": {"num_local_experts": 0},
}
WITH_F16 = VectorTarget(lanes=8, registers=16)
WITHOUT_F16 = VectorTarget(lanes=4, registers=16, has_f16_convert=False)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_only_float16_has_exceptions(architecture, stored):
    fields = {"num_hidden_layers": 2, "max_position_embeddings": 64}
    if architecture.startswith("Gemma"):
        fields["sliding_window"] = 8
    fields = SHAPE | fields | OF_FAMILIES.get(architecture, {}) | {"dtype": stored}
    if architecture.endswith("ForConditionalGeneration"):
        fields = {"text_config": fields}
    config = config_from_fields({"architectures": [architecture], **fields})
    found = [default_dtype(config, target) for target in (WITH_F16, WITHOUT_F16)]
    if stored == "float16" and architecture.startswith("Gemma"):
        assert found == ["bfloat16"] * 2
    elif stored == "float16":
        assert found == ["float16", "float32"]
    else:
        assert found == [stored] * 2


def test_qwen2_of_72b_exceeds_float16():
    fields = SHAPE | {"num_hidden_layers": 1, "max_position_embeddings": 64, "dtype": "float16"}
    for hidden_size, dtype in ((5120, "float16"), (8192, "bfloat16")):
        config = config_from_fields({"model_type": "qwen2", **fields, "hidden_size": hidden_size})
        assert default_dtype(config, WITH_F16) == dtype


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder, "llama", SHAPE)
    return folder


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")]
    + [(kind, "float16") for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")],
)
def test_types_of_gguf_files(llama, kind, dtype, tmp_path):
    file = write_gguf(llama, tmp_path / "m.gguf", quantization=gguf.GGMLQuantizationType[kind])
    assert open_model(file).config().dtype == dtype


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_float16_rounds_quantized_numbers_less(llama, kind, tmp_path):
    """Why quantized files run in float16, on the numbers of their blocks."""
    import ml_dtypes

    file = write_gguf(llama, tmp_path / "m.gguf", quantization=gguf.GGMLQuantizationType[kind])
    name, shape = "model.layers.0.mlp.up_proj.weight", (96, 64)
    exact = open_model(file).tensors().read(name, shape)
    half, brain = (
        np.abs(exact.astype(dtype).astype("float32") - exact).mean()
        for dtype in ("float16", ml_dtypes.bfloat16)
    )
    assert half < brain / 4


@pytest.mark.slow
def test_quantized_gemma_runs_in_bfloat16(tmp_path):
    write_checkpoint(tmp_path, "gemma2", SHAPE | {"sliding_window": 7})
    for kind in ("F16", "Q8_0"):
        file = write_gguf(
            tmp_path, tmp_path / f"{kind}.gguf", quantization=gguf.GGMLQuantizationType[kind]
        )
        assert DecoderModel.from_pretrained(file).options.dtype == "bfloat16"


@pytest.mark.slow
def test_without_conversion_of_float16_models_run_in_float32(llama, tmp_path):
    kind = gguf.GGMLQuantizationType.Q4_1
    file = write_gguf(llama, tmp_path / "m.gguf", quantization=kind)
    model = DecoderModel.from_pretrained(file, target="x86-64")
    assert model.options.dtype == "float32"
    assert DecoderModel.from_pretrained(file).options.dtype == "float16"
    with ParallelModel.from_pretrained(file, stages=2, threads=True) as parallel:
        assert parallel.options.dtype == "float16"


def test_scores_of_qwen2_may_exceed_float16(tmp_path):
    """Its biases of K make products of Q and K that float16 cannot hold; they stay in float32."""
    write_checkpoint(tmp_path, "qwen2", SHAPE | {"tie_word_embeddings": True})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    print("seed 5")
    signs = torch.sign(torch.randn(16, generator=torch.Generator().manual_seed(5)))
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.bias", "k_proj.bias")):  # alike in all heads
            tensors[name] = tensor + 200.0 * signs.repeat(len(tensor) // 16)
    save_file(tensors, file, metadata={"format": "pt"})
    q_bias, k_bias = (
        tensors[f"model.layers.0.self_attn.{name}_proj.bias"].reshape(-1, 16) for name in "qk"
    )
    assert float(q_bias[0] @ k_bias[0]) > 8 * 65504
    (tokens,) = random_tokens(6, 40)
    logits = {}
    for dtype in ("float32", "float16"):
        model = DecoderModel.from_pretrained(tmp_path, dtype)
        cache = model.create_cache(1, 64)
        cache.add_sequence(0)
        logits[dtype] = model.logits(cache, [0], [tokens])[0]
    assert np.isfinite(logits["float16"]).all()
    error = np.abs(logits["float16"] - logits["float32"])
    assert error.max() < 0.01 * np.abs(logits["float32"]).max()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
