# SPDX-License-Identifier: Apache-2.0
"""Write a Llama of random blocks of Q8_0, Q4_0 or Q4_1 as a GGUF file. Needs ``pip install gguf``.

Every token of its vocabulary is a word of its own, so it is run with token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

_HEADERS = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}  # bytes before the codes of a block
_LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def write_random_gguf(file: Path, shape: Mapping, kind: str) -> None:
    """Write a model with the fields of a ``config.json``; what layers add to the stream is small.

    Parameters
    ----------
    kind : {"Q8_0", "Q4_0", "Q4_1"}
        Type of all matrices.
    """
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head_dim, vocabulary = shape["head_dim"], shape["vocab_size"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = ["!", '"', '!"'] + [f"<{i}>" for i in range(3, vocabulary)]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(['! "'])
    writer.add_eos_token_id(2)
    rng, type_id = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type_id]

    def add_matrix(name: str, rows: int, columns: int, scale: float) -> None:
        blocks = rng.integers(0, 256, (rows, columns // block, size), dtype="u1")
        halves = np.float16([scale, -8 * scale]).view("u1")[: _HEADERS[kind]]
        blocks[..., : len(halves)] = halves
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=type_id)

    widths = {"attn_q": heads * head_dim, "attn_k": kv_heads * head_dim}
    widths |= {"attn_v": kv_heads * head_dim, "attn_output": hidden}
    widths |= {"ffn_gate": inner, "ffn_up": inner, "ffn_down": hidden}
    inputs = {"attn_output": heads * head_dim, "ffn_down": inner}
    step = 2e-3 if kind == "Q8_0" else 2e-2
    add_matrix("token_embd", vocabulary, hidden, step)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(shape["num_hidden_layers"]):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
        for name in _LAYER:
            scale = step * (1e-3 if name in inputs else 1)
            add_matrix(f"blk.{layer}.{name}", widths[name], inputs.get(name, hidden), scale)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
