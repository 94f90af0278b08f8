# SPDX-License-Identifier: Apache-2.0
"""The configurations that the check of a GPU runs: layers of every kind, in three types."""

from __future__ import annotations

from typing import Any

CODED = ("float16-int8", "bfloat16-float8_e4m3fn", "bfloat16-int4")
NAMES = ("bfloat16", "bfloat16-wide", "float16", "float16-wide", "float32", *CODED)
RECURRENT = "recurrent"  # layers: `tests.support.worlds.recurrent_world`
RECURRENT_OPTIONS = {"dtype": "bfloat16", "checkpoint_tokens": 8, "history_tokens": 16}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def config_of(name: str, is_tiny: bool = False) -> dict[str, Any]:
    """Fields of a `KVCacheConfig`, as JSON has them.

    Parameters
    ----------
    name : one of `NAMES`
        bfloat16: groups of 4 query heads, with a window too, and MLA; float16: groups of 4;
        "-wide": groups of 8; float32: odd heads with all that is rare, rotated in the kernels;
        a codec: quantized pages, without a rotation, so that codes are those of the reference.
    is_tiny : bool
        The same kinds of layers, small enough to be emulated.
    """
    dtype, _, variant = name.partition("-")
    is_wide, is_coded = variant == "wide", name in CODED
    kv_heads, dim = (2, 32 if is_coded else 16) if is_tiny else (8, 128)
    group = (3 if is_wide else 2) if is_tiny else (8 if is_wide else 4)
    common = {
        "num_qo_heads": group * kv_heads,
        "num_kv_heads": kv_heads,
        "qk_head_dim": dim,
        "dtype": dtype,
        "page_size": 4 if is_tiny else 16,
        "max_num_sequences": 8,
        "max_total_tokens": 512 if is_tiny else 16384,
        "prefill_chunk_size": 64 if is_tiny else 1024,
    }
    sliding = {"kind": "mha_sliding", "window": 9 if is_tiny else 128}
    if name == "bfloat16":
        latent = (24, 16, 16, 8) if is_tiny else (576, 512, 192, 128)
        mla = dict(zip(("qk_head_dim", "v_head_dim"), latent, strict=False), kind="mla")
        mla |= {"mla_original_qk_head_dim": latent[2], "mla_original_v_head_dim": latent[3]}
        mla |= {"num_qo_heads": 4 if is_tiny else 16}
        layers = [{"kind": "mha"}, sliding, mla]
    elif is_coded:
        common |= {"kv_dtype": variant, "rope": {"mode": "none"}}
        layers = [{"kind": "mha"}]
    elif name != "float32":
        layers = [{"kind": "mha"}]
    else:
        odd = {"num_qo_heads": 5, "num_kv_heads": 1, "qk_head_dim": 24 if is_tiny else 80}
        rope = {"mode": "inline", "rotary_dim": 12, "scaling": YARN}
        common |= {**odd, "page_size": 4, "rope": rope, "logit_softcap": 5.0, "alibi": True}
        common |= {"sliding_window": True}
        layers = [{"kind": "mha"}, sliding]
    return {**common, "num_layers": len(layers), "layers": layers}
