# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama on text that comes with every Python.

Bytes are tokens; the layout of what is saved is Hugging Face's (config.json, model.safetensors in
bfloat16, tokenizer.json). Two sizes:

- "tiny", 1.6 million parameters, on the language reference (`pydoc_data.topics`): the model in the
  package. It knows its text by heart. 20 minutes on two cores.
- "small", 11 million parameters, heads of 64, texts of 1024 bytes, on the sources of the standard
  library, less every tenth file, which `bench_quality.py` reads: 35 minutes on two cores that
  multiply bfloat16. Without that, a step takes 5.8 s on a core; `--steps 450` took 43 minutes and
  reached 1.14 nats/byte.

    pip install torch==2.13.0 safetensors tokenizers
    python scripts/tools/train_tiny.py --size small --out /tmp/small
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from standard_library import sources
from tiny_llama import BOS, CONFIG, EOS, Llama, Trainer, save

TINY = CONFIG
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
    context = size.config["max_position_embeddings"]
    ids = size.ids()
    print(f"{len(ids) / 1e3:.0f} k bytes of text")
    model = Llama(size.config)
    window = torch.arange(context)

    def batch(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = torch.randint(len(ids) - context, (size.batch, 1))
        rows = ids[begin + window]
        return torch.cat([torch.full((size.batch, 1), BOS), rows[:, :-1]], 1), rows

    trainer = Trainer(model, size.matrix_rate)
    loss = trainer.run(args.steps or size.steps, batch, lambda: save(model, size.config, out))
    print(f"saved in {out}, loss {loss:.3f} nats/byte")


if __name__ == "__main__":
    main()
