# SPDX-License-Identifier: Apache-2.0
"""The models that engines run, as mlc-llm's own tools prepare them, and their answers.

They are the included model, a disturbed copy of it for drafts, and a random hybrid.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import torch
import transformers
import tvm
from mlc_trial.build import compile_model
from mlc_trial.checkpoint import Reference as RandomModel
from mlc_trial.families import FAMILIES
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import tvm_pagedkv

from .engine import MAX_BATCH, MAX_CHUNK

HYBRID = "qwen3_5"
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


def random_hybrid(folder: Path, seed: int) -> torch.nn.Module:
    """Write a random checkpoint of Qwen3.5 with the included model's tokenizer; return the model.

    mlc-llm keeps weights as bfloat16, those of norms after it has added one: all numbers here stay
    what they are. The vocabulary is the tokenizer's with a token for padding, which transformers
    adds for Qwen: mlc-llm's softmax reads that many logits, even where a model has fewer.
    """
    num_tokens = 1 + Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).get_vocab_size()
    family = FAMILIES[HYBRID]
    family = dataclasses.replace(family, fields=family.fields | {"vocab_size": num_tokens})
    folder.mkdir(parents=True, exist_ok=True)
    random = RandomModel(family, folder, seed)
    for weight in random.model.parameters():
        weight.data = _exact(weight.data)
    weights = load_file(random.weights)
    save_file({name: _exact(weight) for name, weight in weights.items()}, random.weights)
    (folder / "config.json").write_text(json.dumps(random.config))
    shutil.copy(CHECKPOINT / "tokenizer.json", folder)
    return random.model


def _exact(weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16().float() if weight.ndim > 1 else (weight * 32).round() / 32


def prepare(checkpoint: Path, folder: Path, name: str = "llama") -> Path:
    """Convert a checkpoint into mlc-llm's format."""
    from mlc_llm.interface.convert_weight import convert_weight
    from mlc_llm.interface.gen_config import gen_config
    from mlc_llm.model import MODELS
    from mlc_llm.quantization import QUANTIZATION

    folder.mkdir(parents=True, exist_ok=True)
    config, kind, how = checkpoint / "config.json", MODELS[name], QUANTIZATION["q0f32"]
    unset = (None, None)  # windows; then attention sinks, shards, stages, disaggregation
    gen_config(config, kind, how, "LM", *unset, MAX_CHUNK, *unset, *unset, MAX_BATCH, folder)
    weights, layout = checkpoint / "model.safetensors", "huggingface-safetensor"
    convert_weight(config, how, kind, tvm.cpu(), weights, layout, folder)
    return folder


def compiled(
    folder: Path, library: Path, disaggregation: bool = False, name: str = "llama"
) -> Path:
    """Compile what `prepare` made, unless that was done before."""
    if not library.exists():
        config = json.loads((folder / "mlc-chat-config.json").read_text())
        compile_model(
            name,
            copy.deepcopy(config),
            library,
            prefill_chunk_size=MAX_CHUNK,
            max_batch_size=MAX_BATCH,
            disaggregation=disaggregation,
        )
    return library


class Reference:
    """The likeliest continuations by transformers, without a cache, in float32.

    Parameters
    ----------
    model : torch.nn.Module, optional
        None: the included one.
    """

    def __init__(self, model: torch.nn.Module | None = None):
        if model is None:
            model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT)
        self._model = model.float().eval()

    def continuation(self, prompt: list[int], count: int) -> list[int]:
        tokens = [*prompt]
        with torch.no_grad():
            for _ in range(count):
                logits = self._model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]
