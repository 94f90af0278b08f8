# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama on text that comes with every Python.

Bytes are tokens; the layout of what is saved is Hugging Face's (config.json, model.safetensors in
bfloat16, tokenizer.json). Two sizes:

- "tiny", 1.6 million parameters, on the language reference (`pydoc_data.topics`): the model in the
  package. It knows its text by heart. 20 minutes on two cores.
- "small", 11 million parameters, heads of 64, texts of 1024 bytes, on the sources of the standard
  library, less every tenth file, which `bench_quality.py` reads: 35 minutes on two cores.

    pip install torch==2.13.0 safetensors tokenizers
    python scripts/tools/train_tiny.py --size small --out /tmp/small
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from standard_library import sources
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn

BOS, EOS = 256, 257
TINY = {
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
SMALL = TINY | {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True)
class Size:
    """A model and how it is trained: steps of `batch` texts as long as the model's context."""

    config: dict
    steps: int
    batch: int
    matrix_rate: float  # learning rate of Muon

    def ids(self) -> torch.Tensor:
        """The text it is trained on, int64 [n]."""
        texts = [topics[name] for name in sorted(topics)] if self.config is TINY else sources()[0]
        return as_ids(texts)


SIZES = {"tiny": Size(TINY, 2600, 8, 0.02), "small": Size(SMALL, 1500, 5, 0.01)}


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

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        n = x.shape[-2]
        return x * self.cos[:n].to(x.dtype) + torch.cat([-second, first], -1) * self.sin[:n].to(
            x.dtype
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q = self.rotate(self.q_proj(x).view(b, n, self.heads, self.dim).transpose(1, 2))
        k = self.rotate(self.k_proj(x).view(b, n, self.kv_heads, self.dim).transpose(1, 2))
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Token ids [b, n] to logits [b, n, vocab]; the embedding is also the output matrix."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                shrink = (2 * len(self.layers)) ** -0.5 if "o_proj" in name or "down" in name else 1
                nn.init.normal_(parameter, std=0.04 * shrink)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def build_tokenizer() -> Tokenizer:
    """One id per byte, then ``<bos>`` and ``<eos>``; a text is encoded with ``<bos>`` in front."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(shifted)}
    tokenizer = Tokenizer(models.BPE(vocab={letter[b]: b for b in range(256)}, merges=[]))
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


def as_ids(texts: list[str]) -> torch.Tensor:
    """Texts, each opened by ``<bos>`` and closed by ``<eos>``: int64 [n]."""
    ids: list[int] = []
    for text in texts:
        ids += [BOS, *text.encode(), EOS]
    return torch.tensor(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--out", type=Path, help="default for tiny: that in the package")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out is None and args.size != "tiny":
        parser.error("--out is needed: only the tiny model has a place in the package")
    out = args.out or here / "tvm_pagedkv" / "models" / "tiny"
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    size = SIZES[args.size]
    steps, context = args.steps or size.steps, size.config["max_position_embeddings"]
    ids = size.ids()
    model = Llama(size.config)
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=size.matrix_rate, weight_decay=0.02, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
        f"{len(ids) / 1e3:.0f} k bytes of text, {steps} steps"
    )

    window = torch.arange(context)
    start, average = time.perf_counter(), None
    for step in range(steps):
        progress = step / steps
        rate = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
        begin = torch.randint(len(ids) - context, (size.batch, 1))
        rows = ids[begin + window]
        inputs = torch.cat([torch.full((size.batch, 1), BOS), rows[:, :-1]], 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        average = value if average is None else 0.95 * average + 0.05 * value
        if step % 25 == 24:
            print(
                f"{progress:5.0%}  step {step + 1:5d}  loss {average:.3f} nats/byte  "
                f"{(time.perf_counter() - start) / (step + 1):.2f} s/step",
                flush=True,
            )
        if step % 200 == 199:
            save(model, size.config, out)
    save(model, size.config, out)
    print(f"saved in {out}, loss {average:.3f} nats/byte")


if __name__ == "__main__":
    main()
