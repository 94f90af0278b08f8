# SPDX-License-Identifier: Apache-2.0
"""Peers of a GPU's attention: apache-tvm's own kernels, torch, FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import tvm_ffi
from gpu_check_batches import Batch, Shape
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

SDPA = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION}
WORKSPACE_BYTES = 2**28


class Absent(Exception):
    """Why a peer cannot be measured."""


def stock_library(folder: Path, shape: Shape) -> str:
    """Return the path of apache-tvm's kernels for a layer."""
    dtype = str(shape.dtype).removeprefix("torch.")
    return str(folder / f"{dtype}-{shape.num_qo_heads}-{shape.num_kv_heads}.so")


def stock(folder: Path, shape: Shape, name: str) -> Callable:
    """A kernel of apache-tvm, compiled when the folder was packed."""
    path = Path(stock_library(folder, shape))
    if not path.is_file():
        raise Absent(f"{path.name} was not packed")
    return tvm_ffi.load_module(str(path)).get_function(f"stock_{name}")


def sdpa(batch: Batch, name: str) -> tuple[Callable, Callable]:
    """torch over dense K and V of sequences that are alike: a run, and its output as ours."""
    if len(set(batch.contexts)) > 1:
        raise Absent("sequences of one length only")
    count, rows = len(batch.rows), batch.rows[0]
    k, v = (
        torch.stack(each).transpose(1, 2).contiguous()
        for each in zip(*(batch.dense(i) for i in range(count)), strict=True)
    )
    q = batch.q.view(count, rows, *batch.q.shape[1:]).transpose(1, 2).contiguous()
    is_causal = rows == batch.contexts[0]
    # The last row sees all: `is_causal` would let the first one see the first column only.
    mask = None if is_causal or rows == 1 else causal_lower_right(rows, batch.contexts[0])
    out = []

    def run() -> None:
        with sdpa_kernel(SDPA[name]):
            out[:] = [
                F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=is_causal, scale=batch.scale, enable_gqa=True
                )
            ]

    return run, lambda: out[0].transpose(1, 2).reshape(batch.o.shape)


def flashinfer(batch: Batch, name: str) -> tuple[Callable, Callable]:
    """FlashInfer over the same pages."""
    try:
        import flashinfer
    except ImportError:
        raise Absent("flashinfer is not installed") from None
    shape = batch.shape
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=batch.device)
    table = batch.indptr, batch.page_ids, batch.last_page_len
    heads = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.page_size
    if name == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True
        )
        wrapper.plan(*table, *heads, q_data_type=shape.dtype, kv_data_type=shape.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(batch.query_indptr, *table, *heads, causal=True, q_data_type=shape.dtype)
    out = torch.empty_like(batch.o)
    return lambda: wrapper.run(batch.q, batch.pages, out=out), lambda: out
