# SPDX-License-Identifier: Apache-2.0
"""Tensors that nothing reads: without those of the text model its text would be another one."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("gguf")

from safetensors.numpy import load_file, save_file

from tvm_pagedkv_lm import DecoderModel
from tvm_pagedkv_lm.model.decoder_weights import refuse_unread
from tvm_pagedkv_lm.model.source import TINY, open_model

from ...support.cases.models.gguf_cases import write_gguf
from ...support.cases.models.gguf_families import CASES, SHAPE
from ...support.cases.models.model_cases import write_checkpoint

ONES = np.ones((4, 4), "float32")


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(TINY, tmp_path / "model")


def add(folder, *names: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | dict.fromkeys(names, ONES), folder / "model.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.bias",
        "model.embed_layernorm.weight",
        "model.embed_positions.weight",
        "lm_head.bias",
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.1.post_feedforward_layernorm.weight",
    ],
)
def test_a_tensor_of_the_text_model(folder, name):
    add(folder, name)
    with pytest.raises(ValueError, match=f"has tensor {re.escape(name)}, which the model of this"):
        DecoderModel.from_pretrained(folder)


def test_tensors_of_something_else(folder):
    """Heads of other tasks, encoders, draft layers, and tables that follow from config.json."""
    add(folder, "score.weight", "vision_tower.patch.weight", "mtp.fc.weight", "visual.merger.bias",
        "model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.cos_cached")  # fmt: skip
    DecoderModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("case", "name", "message"),
    [
        ("llama", "output_norm.bias", "model.norm.bias"),
        ("llama", "output.bias", "lm_head.bias"),
        ("llama", "altup_proj.weight", "altup_proj.weight"),
        ("llama", "per_layer_proj_norm.weight", "per_layer_proj_norm.weight"),
        ("llama", "blk.0.attn_v_b.weight", "blk.0.attn_v_b.weight"),
        ("qwen3 with experts", "blk.0.ffn_gate_shexp.weight", "shared_experts.gate_proj.weight"),
        ("qwen3 with experts", "blk.0.exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
        ("glm-4.5", "blk.0.ffn_norm.weight", "blk.0.ffn_norm.weight"),
    ],
)
def test_a_tensor_of_a_gguf_file(case, name, message, tmp_path):
    model_type, fields, keys, tensors = CASES[case]
    write_checkpoint(tmp_path, model_type, SHAPE | fields)
    more = (tensors or {}) | {name: ONES}
    file = write_gguf(tmp_path, tmp_path / "model.gguf", keys=keys, tensors=more)
    with pytest.raises(ValueError, match=re.escape(message)):
        source = open_model(file)
        refuse_unread(source.config(), source.tensors())
