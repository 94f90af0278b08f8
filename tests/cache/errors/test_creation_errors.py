# SPDX-License-Identifier: Apache-2.0
"""Configurations and kernels that no cache is made of raise errors that name what was wrong."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from ...support.cases.caches.cache_cases import layer_of
from ...support.emulators.python_kernels import KERNELS, LAYER, MLA_LAYER, make_cache, make_config

create = tvm_ffi.get_global_func("pagedkv.create")

CREATION = {
    "unknown_field": (ValueError, "unknown field 'colour' in config; known: max", {"colour": 1}),
    "page_size": (ValueError, "power of two, got 3", {"page_size": 3}),
    "page_size_zero": (ValueError, "page_size must be between 1 and 256", {"page_size": 0}),
    "page_size_huge": (ValueError, "page_size must be between", {"page_size": 2**40}),
    "tokens": (ValueError, "max_total_tokens must be between", {"max_total_tokens": 2**31}),
    "tokens_negative": (ValueError, "max_total_tokens", {"max_total_tokens": -1}),
    "sequences": (ValueError, "max_num_sequences", {"max_num_sequences": 0}),
    "chunk": (ValueError, "prefill_chunk_size", {"prefill_chunk_size": 0}),
    "tiles": (
        ValueError,
        r"prefill_chunk_size \(1073741824\) times num_kv_heads \(2\) must be below",
        {"prefill_chunk_size": 2**30},
    ),
    "dtype": (ValueError, "dtype must be one of", {"dtype": "int8"}),
    "dtype_type": (TypeError, "'dtype'.*wrong type", {"dtype": 3}),
    "kv_dtype": (ValueError, "kv_dtype must be one of", {"kv_dtype": "complex"}),
    "rope_mode": (ValueError, "rope_mode", {"rope_mode": 3}),
    "aux": (ValueError, "aux_manager must be one of", {"aux_manager": "best"}),
    "factors": (
        ValueError,
        "rope_ext_factors",
        {"rope_ext_factors": tvm.runtime.tensor(np.ones(8, "float32"))},
    ),
    "no_layers": (ValueError, "at least one layer", {"layers": []}),
    "layer_type": (TypeError, r"\['layers'\]\[0\] must be a map", {"layers": [3]}),
    "sliding": (
        ValueError,
        "window must be between 1",
        {"layers": [{**LAYER, "kind": "mha_sliding", "window": 0}]},
    ),
    "mla_heads": (ValueError, "must be 1, got 2", {"layers": [{**LAYER, "kind": "mla"}]}),
    "mla_v_head_dim": (
        ValueError,
        "v_head_dim of an MLA layer",
        {"layers": [{**MLA_LAYER, "v_head_dim": 32}]},
    ),
    "mla_one_original_dim": (
        ValueError,
        "given together",
        {"layers": [{**MLA_LAYER, "mla_original_v_head_dim": 0}]},
    ),
    "mla_dims_of_mha": (
        ValueError,
        "mla_original_qk_head_dim",
        {"layers": [{**LAYER, "mla_original_qk_head_dim": 8}]},
    ),
    "mla_kernels": (
        ValueError,
        "missing: transpose_append_mla, mla_prefill",
        {"layers": [MLA_LAYER]},
    ),
    "kind": (ValueError, "must be one of mha", {"layers": [{**LAYER, "kind": "other"}]}),
    "stages": (ValueError, "not a Disco worker", {"layer_indptr": Shape([0, 1, 2])}),
    "layer_indptr": (ValueError, r"got \[0, 1\]", {"layer_indptr": Shape([0, 1])}),
    "layer_indptr_falls": (ValueError, "never fall", {"layer_indptr": Shape([0, 2, 1, 2])}),
    "stage": (
        ValueError,
        "stage must be between 0 and 1",
        {"layer_indptr": Shape([0, 1, 2]), "stage": 2},
    ),
    "window": (
        ValueError,
        "required for kinds 'mha_sliding' and 'mha_chunked', and invalid otherwise",
        {"layers": [{**LAYER, "window": 4}]},
    ),
    "chunks without a size": (ValueError, "window", {"layers": [{**LAYER, "kind": "mha_chunked"}]}),
    "chunks and windows of sequences": (
        ValueError,
        "windows of sequences are not possible with layer 0, which attends within chunks",
        {"layers": [{**LAYER, "kind": "mha_chunked", "window": 4}], "sliding_window": True},
    ),
    "heads": (ValueError, "multiple", {"layers": [{**LAYER, "num_kv_heads": 3}]}),
    "heads_zero": (ValueError, "num_kv_heads", {"layers": [{**LAYER, "num_kv_heads": 0}]}),
    "v_head_dim": (ValueError, "v_head_dim", {"layers": [{**LAYER, "v_head_dim": -4}]}),
    "kernel_set": (ValueError, "kernel_set", {"layers": [{**LAYER, "kernel_set": 1}]}),
    "theta": (
        ValueError,
        "rope_theta",
        {"layers": [{**LAYER, "rope_theta": 0.0}], "rope_mode": 1},
    ),
    "layer_field": (ValueError, "unknown field 'size'", {"layers": [{**LAYER, "size": 1}]}),
}


@pytest.mark.parametrize("name", list(CREATION))
def test_creation(name):
    error, text, fields = CREATION[name]
    with pytest.raises(error, match=text):
        make_cache(**fields)


def test_creation_beyond_all_memory():
    wide = {**LAYER, "num_qo_heads": 4096, "num_kv_heads": 4096, "qk_head_dim": 4096}
    with pytest.raises(MemoryError, match="cannot allocate [0-9]+ bytes"):
        make_cache(layers=[wide], page_size=1, max_total_tokens=2**31 - 257)


def test_creation_lacks_a_field():
    config = make_config()
    del config["page_size"]
    with pytest.raises(ValueError, match="config lacks the field 'page_size'"):
        create(config, KERNELS, tvm.cpu())


def test_kernels_of_layers_with_a_window():
    sliding = layer_of(4)
    with pytest.raises(ValueError, match="missing: prefill_sliding, decode_sliding"):
        make_cache({"prefill_sliding": None, "decode_sliding": None}, layers=[LAYER, sliding])
    make_cache({"prefill": None, "decode": None}, layers=[sliding])
    # The stock cache's see the past alone: what the rows see of each other is merged with that.
    stock = {"decode_sliding": ["tirx", KERNELS["decode_sliding"]]}
    make_cache(stock, layers=[sliding])
    with pytest.raises(ValueError, match="attends within chunks, which kernels of the stock cache"):
        make_cache(stock, layers=[layer_of(-4)])
    for name in ("split_rotary", "prefill_ragged", "merge"):
        with pytest.raises(ValueError, match=f"missing: {name}"):
            make_cache({**stock, name: None}, layers=[sliding])


KERNEL_ERRORS = {
    "unknown": (ValueError, "unknown kernel 'attend'; known: transpose_append", {"attend": print}),
    "missing": (ValueError, "missing: prefill, decode", {"prefill": None, "decode": None}),
    "split": (ValueError, "missing: split_rotary", {"split_rotary": None}),
    "type": (TypeError, "'decode' must be a function", {"decode": 3}),
    "tag": (ValueError, "tag 'cuda'", {"decode": ["cuda", print]}),
    "tag_only": (TypeError, "one function after its tag", {"decode": ["tirx"]}),
    "flashinfer": (ValueError, "FlashInfer", {"tree": ["flashinfer", print, print]}),
    "flashinfer plan": (TypeError, "two functions", {"decode": ["flashinfer", print]}),
    "no_tag": (TypeError, "'decode' must be a function", {"decode": [print]}),
}


@pytest.mark.parametrize("name", list(KERNEL_ERRORS))
def test_kernels(name):
    error, text, kernels = KERNEL_ERRORS[name]
    with pytest.raises(error, match=text):
        make_cache(kernels)


def test_kernels_of_a_wrong_type():
    with pytest.raises(TypeError, match="kernels must be a map"):
        create(make_config(), 3, tvm.cpu())
    with pytest.raises(ValueError, match="at least one set of kernels"):
        create(make_config(), [], tvm.cpu())


def test_kvcache_cannot_be_made_directly():
    with pytest.raises(TypeError):
        pkv.KVCache()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
