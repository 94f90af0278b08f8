# SPDX-License-Identifier: Apache-2.0
"""Train a Llama of two layers to copy: to go on with what once followed the last token.

The texts are random tokens, each of which comes once, but the second half copies spans of what came
before. Two layers learn to look for the last token and to read what followed it (an induction head,
Olsson et al. 2022), first in short texts, where that takes few steps. Then their positions jump to
those of long texts, so that the distance does not matter, and the texts grow from 64 to 8192
tokens, so that there is more to choose from. `bench_quality.py --needle` needs such a model. A step
takes 0.2 to 4 s on a core, the whole 20 minutes.

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
    "rope_theta": 1e9,  # over half of the pairs turn by less than a radian in 8192 positions
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
}
# Tokens of a text, texts in a step, jumps of positions, steps, learning rates of Muon and AdamW.
STAGES = [
    (64, 32, 0, 700, 0.01, 4e-3),
    (64, 32, 3, 1200, 0.01, 4e-3),
    (512, 4, 3, 400, 0.003, 1e-3),
    (2048, 1, 3, 300, 0.003, 1e-3),
    (8192, 1, 0, 100, 0.003, 1e-3),
]


def copies(
    batch: int, length: int, num_jumps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make texts int64 ``[batch, length]`` and their targets, -100 where nobody can know them.

    Returns
    -------
    tuple of torch.Tensor
        Texts, targets, and positions int64 ``[length]`` with jumps at random places.
    """
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
    left = COPY["max_position_embeddings"] - length
    jumps = torch.zeros(length, dtype=torch.int64)
    for place in torch.randint(length, (num_jumps,)):
        jumps[place] = torch.randint(left // num_jumps + 1, ())
    positions = torch.arange(length) + jumps.cumsum(0)
    return ids[:, :-1], torch.where(known, ids, -100)[:, 1:], positions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    model = Llama(COPY)
    for length, batch, num_jumps, steps, *rates in STAGES:
        print(f"texts of {length} tokens, {batch} a step, {num_jumps} jumps")

        def texts(_, shape=(batch, length, num_jumps)):
            return copies(*shape)

        loss = Trainer(model, *rates).run(steps, texts, lambda: save(model, COPY, args.out))
    print(f"saved in {args.out}, loss {loss:.3f} nats/token")


if __name__ == "__main__":
    main()
