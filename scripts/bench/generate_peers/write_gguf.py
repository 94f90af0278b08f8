# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory of the Llama family becomes a GGUF file for llama.cpp, same weights.

    python write_gguf.py DIRECTORY FILE bf16|f16

Needs ``pip install gguf``. There is no tokenizer in the file: it is run with token ids.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

TYPES = {"bf16": gguf.GGMLQuantizationType.BF16, "f16": gguf.GGMLQuantizationType.F16}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(file: Path):
    """Names and bfloat16 tensors of a safetensors file, as float32, one at a time."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    data = np.memmap(file, np.uint8, "r", 8 + length)
    header.pop("__metadata__", None)
    for name, about in header.items():
        if about["dtype"] != "BF16":
            raise ValueError(f"{name} is {about['dtype']}, and only BF16 is read")
        begin, end = about["data_offsets"]
        bits = data[begin:end].view(np.uint16).astype(np.uint32) << 16
        yield name, bits.view(np.float32).reshape(about["shape"])


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of Q or K such that the pairs that RoPE turns are neighbours, as llama.cpp has them."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    stem = name.removesuffix(".weight")
    if stem in OTHERS:
        return f"{OTHERS[stem]}.weight"
    _, _, layer, stem = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[stem]}.weight"


def main() -> None:
    directory, file, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    c = json.loads((directory / "config.json").read_text())
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_rope_dimension_count(c["head_dim"])
    writer.add_rope_freq_base(c["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_vocab_size(c["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, weight in tensors(directory / "model.safetensors"):
        if "q_proj" in name or "k_proj" in name:
            weight = interleaved(weight, heads if "q_proj" in name else kv_heads)
        kept = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else TYPES[kind]
        weight = gguf.quants.quantize(np.ascontiguousarray(weight), kept)
        writer.add_tensor(gguf_name(name), weight, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
