#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Write a Hugging Face directory with a Llama of random weights, by default one of 1B parameters.

Its tokenizer is the included model's. What the layers add to the residual stream is small, so that
its text depends on little but the last token.

    python scripts/tools/random_llama.py /tmp/llama-1b
    tvm-pagedkv generate --model /tmp/llama-1b --dtype bfloat16 --file prompt.txt
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from tvm_pagedkv_lm import config_from_directory  # noqa: E402
from tvm_pagedkv_lm.model.decoder_weights import weights  # noqa: E402
from tvm_pagedkv_lm.model.source import TINY  # noqa: E402

SHAPE_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def write_random_llama(folder: Path, shape: dict) -> int:
    """Write the directory, in bfloat16; fields that `shape` lacks are the included model's.

    Returns
    -------
    int
        Number of parameters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(TINY / "tokenizer.json", folder)
    fields = json.loads((TINY / "config.json").read_text()) | shape
    (folder / "config.json").write_text(json.dumps(fields))
    rng, tensors = np.random.default_rng(0), {}
    config = config_from_directory(folder)
    for _, weight in weights(config, range(config.num_layers)):
        for name, dimensions, *_ in weight.parts:
            if name in tensors:  # tied
                continue
            if weight.is_matrix:
                scale = 1e-5 if "o_proj" in name or "down_proj" in name else 0.05
                values = rng.standard_normal(dimensions, dtype=np.float32) * np.float32(scale)
            else:
                values = np.ones(dimensions, np.float32)  # of norms
            tensors[name] = values.astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    return sum(tensor.size for tensor in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", type=json.loads, default=SHAPE_1B, help="fields of config.json")
    arguments = parser.parse_args()
    count = write_random_llama(arguments.folder, arguments.shape)
    print(f"{count / 1e6:.0f} million parameters in {arguments.folder}")


if __name__ == "__main__":
    main()
