# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions along the tokens, whose earlier rows lie in pages."""

from dataclasses import replace

from tvm.script import tirx as T

from ...conv_spec import ConvSpec
from ...define import attributes
from ...layout import slot_offset, slot_page
from ...script import prim_func
from ...semantics.decay import exp
from ...signatures.states import CAUSAL_CONV, ConvInputs
from ..isa import isa_of
from ..registers import F32, Registers, run_length
from .requested_rows import RequestedRows

THREADS = 128
TOKENS = 8  # of a block, which share the weights


def causal_conv(spec: ConvSpec):
    """Build the kernel `causal_conv`.

    A thread takes a few channels through a few tokens.
    """
    isa = isa_of(spec.target)
    channels, width, page_size = spec.channels, spec.width, spec.page_size
    num_taps = spec.width - 1
    run = run_length(channels)
    num_runs = channels // run

    @prim_func(arguments=replace(CAUSAL_CONV, count_dtype="int32").of(spec, pages=spec.rows))
    def causal_conv(a: ConvInputs):
        T.func_attr(attributes(spec.rows))
        x, pages, tap_slots, out = T.meta_var((a.x, a.pages, a.tap_slots, a.out))
        num_tokens = T.meta_var(x.shape[0])

        grid = T.meta_var([-(-num_runs // THREADS), T.ceildiv(num_tokens, TOKENS)])
        with isa.launch(grid, THREADS) as ((part, chunk), thread):
            channel = (part * THREADS + thread) * run
            filters = T.alloc_local((run * width,), F32, layout=None)
            biases = T.alloc_local((run,), F32, layout=None)
            inputs = T.alloc_local((run,), F32, layout=None)
            sums = T.alloc_local((run,), F32, layout=None)
            weights = RequestedRows(isa, run * width, spec.dtype)
            rows = RequestedRows(isa, run, spec.dtype, width)

            if channel < channels:
                weights.request(a.weight.view(channels * width), (), channel * width)
                weights.take(filters)
                if spec.has_bias:
                    rows.request(a.bias, (), channel)
                    rows.take(biases)
                else:
                    for e in T.unroll(run):
                        biases[e] = T.float32(0)
                begin = chunk * TOKENS
                for token in range(begin, T.min(begin + TOKENS, num_tokens)):
                    rows.request(x, (token,), channel, num_taps)
                    for i in T.unroll(num_taps):
                        slot = tap_slots[token, i]
                        if slot >= 0:
                            page, offset = slot_page(slot, page_size), slot_offset(slot, page_size)
                            rows.request(pages, (page, offset), channel, i)
                        else:
                            rows.clear(i)
                    for e in T.unroll(run):
                        sums[e] = biases[e]
                    for i in T.unroll(width):
                        rows.take(inputs, i)
                        for e in T.unroll(run):
                            factor = T.meta_var(filters[e * width + i])
                            sums[e] = isa.fused_multiply_add(inputs[e], factor, sums[e])
                    if spec.activation == "silu":
                        for e in T.unroll(run):
                            sums[e] = silu(isa, sums[e])
                    isa.store_floats(out, (token, channel), Registers.of(sums))

    return causal_conv


def silu(isa, x):
    """``x * sigmoid(x)`` to float32 rounding."""
    return x / (T.float32(1) + exp(T.float32(0) - x, 1, isa))
