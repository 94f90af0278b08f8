# SPDX-License-Identifier: Apache-2.0
"""The included model and a disturbed copy for drafts, as mlc-llm's own tools prepare them."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import torch
import transformers
import tvm
from mlc_trial.build import compile_model
from safetensors.torch import load_file, save_file

import tvm_pagedkv

from .engine import MAX_BATCH, MAX_CHUNK

CHECKPOINT = Path(tvm_pagedkv.__file__).parent / "models" / "tiny"


def disturbed_copy(folder: Path, seed: int) -> Path:
    """A copy of the checkpoint whose text is mostly, but not always, that of the original."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(CHECKPOINT / name, folder)
    torch.manual_seed(seed)
    weights = load_file(CHECKPOINT / "model.safetensors")
    for weight in weights.values():
        if weight.ndim == 2:
            weight += 0.1 * weight.float().std() * torch.randn_like(weight)
    save_file(weights, folder / "model.safetensors")
    return folder


def prepare(checkpoint: Path, folder: Path) -> Path:
    """Convert a checkpoint into mlc-llm's format."""
    from mlc_llm.interface.convert_weight import convert_weight
    from mlc_llm.interface.gen_config import gen_config
    from mlc_llm.model import MODELS
    from mlc_llm.quantization import QUANTIZATION

    folder.mkdir(parents=True, exist_ok=True)
    config, kind, how = checkpoint / "config.json", MODELS["llama"], QUANTIZATION["q0f32"]
    unset = (None, None)  # windows; then attention sinks, shards, stages, disaggregation
    gen_config(config, kind, how, "LM", *unset, MAX_CHUNK, *unset, *unset, MAX_BATCH, folder)
    weights, layout = checkpoint / "model.safetensors", "huggingface-safetensor"
    convert_weight(config, how, kind, tvm.cpu(), weights, layout, folder)
    return folder


def compiled(folder: Path, library: Path, disaggregation: bool = False) -> Path:
    """Compile what `prepare` made, unless that was done before."""
    if not library.exists():
        config = json.loads((folder / "mlc-chat-config.json").read_text())
        compile_model(
            "llama",
            copy.deepcopy(config),
            library,
            prefill_chunk_size=MAX_CHUNK,
            max_batch_size=MAX_BATCH,
            disaggregation=disaggregation,
        )
    return library


class Reference:
    """The likeliest continuations by transformers, without a cache, in float32."""

    def __init__(self):
        model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT)
        self._model = model.float().eval()

    def continuation(self, prompt: list[int], count: int) -> list[int]:
        tokens = [*prompt]
        with torch.no_grad():
            for _ in range(count):
                logits = self._model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]
