# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints, and what transformers computes with them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from .families import Family


class Reference:
    """A random model of a family in transformers, float32, with attention written out."""

    def __init__(self, family: Family, folder: Path, seed: int):
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(family.kind, **family.fields)
        config._attn_implementation = "eager"
        self.model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        _draw_weights(self.model, has_codes=family.quantization != "q0f32")
        self.model.save_pretrained(folder)
        self.weights = folder / "model.safetensors"
        before, after = family.rename
        if before != after:
            tensors = load_file(self.weights)
            for name in [name for name in tensors if name.startswith(before)]:
                tensors[after + name.removeprefix(before)] = tensors.pop(name)
            save_file(tensors, self.weights)
        # With all defaults, as published checkpoints have them.
        self.config = json.loads(config.to_json_string(use_diff=False)) | family.mlc_fields

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Logits after each token, ``[len(tokens), vocab_size]``, without a cache."""
        with torch.no_grad():
            out = self.model(torch.tensor([tokens]), use_cache=False)
        return out.logits[0].float().numpy()


def _draw_weights(model: Any, has_codes: bool) -> None:
    """Weights that make attention sharp and every bias and norm count.

    With codes, matrices are whole numbers up to 7 times a power of two, and each group of 32 input
    features has a 7, so that codes of 4 bits stand for these very numbers.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                is_query_or_key = any(part in name for part in ("q_proj", "k_proj"))
                gain = 2.0 if is_query_or_key else 1.0
                size = gain / weight.shape[-1] ** 0.5
                if has_codes:
                    whole = torch.randint(-7, 8, weight.shape).float()
                    whole[..., ::32] = 7.0
                    weight.copy_(whole * 2.0 ** math.floor(math.log2(size / 4)))
                else:
                    weight.normal_(0.0, size)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
