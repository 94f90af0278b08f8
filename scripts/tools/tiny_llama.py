# SPDX-License-Identifier: Apache-2.0
"""A small Llama in torch, how it is trained and saved: what the training scripts share."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn

from tvm_pagedkv_lm.text.byte_level import byte_characters

BOS, EOS = 256, 257
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings; parameter names are Hugging Face's."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.dim = c["head_dim"]
        self.q_proj = nn.Linear(c["hidden_size"], self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c["hidden_size"], bias=False)
        frequency = c["rope_theta"] ** (-torch.arange(0, self.dim, 2) / self.dim)
        angle = torch.outer(torch.arange(c["max_position_embeddings"]), frequency)
        self.register_buffer("cos", torch.cat([angle, angle], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angle, angle], -1).sin(), persistent=False)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[positions].to(x.dtype), self.sin[positions].to(x.dtype)
        return x * cos + torch.cat([-second, first], -1) * sin

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.kv_heads, self.dim).transpose(1, 2)
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        v = self.v_proj(x).view(b, n, self.kv_heads, self.dim).transpose(1, 2)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(o.transpose(1, 2).reshape(b, n, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each behind an RMS norm and a residual."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Token ids [b, n] to logits; the embedding is also the output matrix."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                shrink = (2 * len(self.layers)) ** -0.5 if "o_proj" in name or "down" in name else 1
                nn.init.normal_(parameter, std=0.04 * shrink)

    def forward(
        self, ids: torch.Tensor, counts: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute logits ``[k, vocab]`` at the k tokens that bool ``[b, n]`` `counts` marks.

        The tokens are at `positions`, int64 ``[n]``; None: 0 and so on.
        """
        x = self.embed_tokens(ids)
        positions = torch.arange(ids.shape[1]) if positions is None else positions
        for layer in self.layers:
            x = layer(x, positions)
        return F.linear(self.norm(x[counts]), self.embed_tokens.weight)


def build_tokenizer() -> Tokenizer:
    """One id per byte, then ``<bos>`` and ``<eos>``; a text is encoded with ``<bos>`` in front."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def save(model: Llama, config: dict, folder: Path) -> None:
    """Write the checkpoint in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": parameter.detach().to(torch.bfloat16).contiguous()
        for name, parameter in model.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    build_tokenizer().save(str(folder / "tokenizer.json"))


class Trainer:
    """Muon for the matrices, AdamW for the rest, a warm-up and a cosine.

    Parameters
    ----------
    model : Llama
    matrix_rate, other_rate : float
        The learning rates of Muon and of AdamW.
    """

    def __init__(self, model: Llama, matrix_rate: float, other_rate: float = 4e-3) -> None:
        self.model = model
        matrices = [p for p in model.layers.parameters() if p.ndim == 2]
        others = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=0.02, adjust_lr_fn="original"),
            torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.peaks = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]

    def run(
        self,
        steps: int,
        batch: Callable[[int], tuple[torch.Tensor, ...]],
        save: Callable[[], None] = lambda: None,
    ) -> float:
        """Train on ``batch(step)``: ids and targets int64 ``[b, n]``, then positions or nothing.

        Targets of -100 do not count.

        Returns
        -------
        float
            The loss in nats per token, averaged over the last steps.
        """
        parameters = sum(p.numel() for p in self.model.parameters())
        print(f"{parameters / 1e6:.2f} M parameters, {steps} steps", flush=True)
        start, average = time.perf_counter(), math.nan
        has_bfloat16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
        for step in range(steps):
            cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
            for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 50) * cosine
            inputs, targets, *positions = batch(step)
            counts = targets != -100
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bfloat16):
                logits = self.model(inputs, counts, *positions)
            loss = F.cross_entropy(logits.float(), targets[counts])
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            value = loss.item()
            average = value if step == 0 else 0.95 * average + 0.05 * value
            if step % 25 == 24:
                seconds = (time.perf_counter() - start) / (step + 1)
                print(
                    f"{step / steps:5.0%}  step {step + 1:5d}  loss {average:.3f} nats/token  "
                    f"{seconds:.2f} s/step",
                    flush=True,
                )
            if step % 200 == 199:
                save()
        save()
        return average
