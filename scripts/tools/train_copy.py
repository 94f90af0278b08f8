# SPDX-License-Identifier: Apache-2.0
"""Train a Llama of two layers to copy: to go on with what once followed the last token.

The texts are random tokens, each of which comes once, but the second half copies spans of what came
before. Two layers learn to look for the last token and to read what followed it (an induction head,
Olsson et al. 2022), first in short texts, where that takes few steps. Then the contexts grow from
64 to 8192 tokens, so that the model looks 4000 tokens back and more. `bench_quality.py --needle`
needs such a model. 15 minutes on two cores.

    pip install torch==2.13.0 safetensors tokenizers
    python scripts/tools/train_copy.py --out /tmp/copy
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tiny_llama import CONFIG, Llama, Trainer, save

COPY = CONFIG | {
    "vocab_size": 12288,  # more than a text has tokens
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 1e6,  # half of the pairs turn by less than a radian in 8192 positions
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
# Tokens of a text, texts in a step, steps, learning rates of Muon and of AdamW.
STAGES = [
    (64, 32, 1200, 0.01, 4e-3),
    (256, 8, 300, 0.003, 1e-3),
    (1024, 2, 200, 0.003, 1e-3),
    (8192, 1, 150, 0.003, 1e-3),
]


def copies(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make texts int64 ``[batch, length]`` and their targets, -100 where nobody can know them."""
    ids = torch.stack([torch.randperm(COPY["vocab_size"])[: length + 1] for _ in range(batch)])
    known = torch.zeros_like(ids, dtype=torch.bool)
    for row in range(batch):
        end = length // 2
        while end <= length:
            size = min(int(torch.randint(4, 17, ())), length + 1 - end)
            begin = int(torch.randint(0, end - size, ()))
            ids[row, end : end + size] = ids[row, begin : begin + size]
            known[row, end + 1 : end + size] = True
            end += size
    return ids[:, :-1], torch.where(known, ids, -100)[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    model = Llama(COPY)
    for length, batch, steps, *rates in STAGES:
        print(f"texts of {length} tokens, {batch} a step")
        loss = Trainer(model, *rates).run(
            steps, lambda _, b=batch, n=length: copies(b, n), lambda: save(model, COPY, args.out)
        )
    print(f"saved in {args.out}, loss {loss:.3f} nats/token")


if __name__ == "__main__":
    main()
