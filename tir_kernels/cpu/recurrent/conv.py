# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions along the tokens, whose earlier rows lie in pages."""

import math

from tvm.script import tirx as T

from ...conv_spec import ConvSpec
from ...define import target_attributes
from ...layout import slot_offset, slot_page
from ...script import inline, prim_func
from ...semantics.decay import exp
from ...signatures.states import CAUSAL_CONV, ConvInputs
from ...spec import ITEMSIZE
from ..isa import simd
from ..isa.row_vectors import RowNumbers
from ..isa.simd import F32, constant, load, prefetch, ramp, require_half_target, shuffle, temp
from ..worker import items

BLOCK = 512  # channels of an item, whose weights take less than half of a small L1 cache
TOKENS = 64  # of an item, which share them
AHEAD = 4  # tokens whose rows are asked for in advance


@T.meta_class
class Filters:
    """Weights and biases of a block of channels, and the sums of a chunk of a row.

    Parameters
    ----------
    spec : ConvSpec
    numbers : RowNumbers
    weight : Buffer ``[channels, width]``
    bias : Buffer ``[channels]`` or None
    """

    def __init__(self, spec: ConvSpec, numbers: RowNumbers, weight, bias):
        self.spec, self.numbers, self.bias = spec, numbers, bias
        self.chunk = math.gcd(spec.channels, numbers.wide)
        self.parts = numbers.parts(0, self.chunk)
        self.flat_weight = weight.view(spec.channels * spec.width)
        # In the order of chunks; weights tap by tap.
        self.weights = T.alloc_buffer((spec.width, BLOCK), F32)
        self.biases = T.alloc_buffer((BLOCK,), F32)
        self.sums = T.alloc_local((self.chunk,), F32)

    def load(self, first, column) -> None:
        """Take those of the chunk that begins at a column of the block from channel `first` on."""
        biases = [constant(0.0, lanes) for _, lanes in self.parts]
        if self.bias is not None:
            biases = [load(self.bias, (first + column + at,), lanes) for at, lanes in self.parts]
        self._put(self.biases, (), column, biases)
        taps = [self._taps(first + column + at, lanes) for at, lanes in self.parts]
        for i, vectors in enumerate(zip(*taps, strict=True)):
            self._put(self.weights, (i,), column, vectors)

    def _taps(self, channel, lanes: int) -> list:
        """Return the vectors of the taps of consecutive channels."""
        width = self.spec.width
        rows = [
            temp(load(self.flat_weight, (channel * width + i * lanes,), lanes), lanes)
            for i in range(width)
        ]
        if lanes == 1:
            return rows
        return [shuffle(rows, range(i, width * lanes, width)) for i in range(width)]

    def _put(self, buffer, row: tuple, column, vectors) -> None:
        taken = [temp(v, n) for v, (_, n) in zip(vectors, self.parts, strict=True)]
        for (at, lanes), vector in zip(self.parts, self.numbers.reorder(taken), strict=True):
            T.buffer_store(buffer, vector, [*row, ramp(column + at, lanes)])

    def begin(self, column) -> None:
        """Begin sums with the biases."""
        for at, lanes in self.parts:
            bias = load(self.biases, (column + at,), lanes)
            T.buffer_store(self.sums, bias, [ramp(at, lanes)])

    def add(self, i: int, column, rows, index: tuple) -> None:
        """Add tap i of a row, which the block's columns of an array have at an index."""
        for (at, lanes), value in zip(
            self.parts, self.numbers.load(rows, index, self.chunk), strict=True
        ):
            product = value * load(self.weights, (i, column + at), lanes)
            total = self.sums[ramp(at, lanes)] + product
            T.buffer_store(self.sums, total, [ramp(at, lanes)])

    def store(self, out, index: tuple) -> None:
        """Store what the activation makes of the sums."""
        sums = [(temp(self.sums[ramp(at, lanes)], lanes), lanes) for at, lanes in self.parts]
        if self.spec.activation == "silu":
            sums = [(silu(x, lanes), lanes) for x, lanes in sums]
        self.numbers.store(out, index, self.chunk, [x for x, _ in sums])


def silu(x, lanes: int):
    """``x * sigmoid(x)`` to float32 rounding."""
    one, negative = constant(1.0, lanes), temp(constant(0.0, lanes) - x, lanes)
    return temp(x / (one + exp(negative, lanes, simd)), lanes)


def causal_conv(spec: ConvSpec):
    """Build the kernel that computes rows of a causal convolution.

    Row t of out is ``act(bias + sum(weight[:, i] * row(t, i)))`` for i from 0 to
    ``width - 1``. The last of these rows is ``x[t]``, and each one before it is in slot
    ``tap_slots[t, i]`` of the pages; -1: zeros.

    Returns
    -------
    tvm.tirx.PrimFunc
        Private, free to be named by its module.
    """
    require_half_target(spec.target, [spec.dtype], f"dtype={spec.dtype}")
    channels, width, page_size = spec.channels, spec.width, spec.page_size
    num_taps = spec.width - 1
    blocks = -(-channels // BLOCK)

    def paged(slot) -> tuple:
        return slot_page(slot, page_size), slot_offset(slot, page_size)

    item_bytes = min(channels, BLOCK) * (2 * TOKENS + width) * ITEMSIZE[spec.dtype]

    @prim_func(arguments=CAUSAL_CONV.of(spec, pages=spec.rows))
    def causal_conv(a: ConvInputs):
        T.func_attr(target_attributes(on_cpu=True))
        x, pages, tap_slots, out = T.meta_var((a.x, a.pages, a.tap_slots, a.out))
        num_tokens = T.meta_var(x.shape[0])
        numbers = RowNumbers(spec.target, (x, pages, out))
        numbers.open_scope()

        for item in items(T.ceildiv(num_tokens, TOKENS) * blocks, item_bytes):
            filters = Filters(spec, numbers, a.weight, a.bias)
            taps = T.alloc_local((num_taps,), "int32")

            @inline
            def convolve(token, ahead, first, count, has_all):
                """Compute the block's columns of a row; `has_all`: no tap is missing.

                Columns of one row after another are far apart, so the CPU does not see what comes.
                """
                next_slot = tap_slots[ahead, num_taps - 1]
                next_page, next_offset = T.meta_var(paged(next_slot))
                for chunk in range(T.truncdiv(count, filters.chunk)):
                    column = chunk * filters.chunk
                    prefetch(x, (ahead, first + column))
                    prefetch(pages, (next_page, next_offset, first + column))
                    filters.begin(column)
                    for i in T.unroll(num_taps):
                        slot = taps[i]
                        if has_all or slot >= 0:
                            page, offset = T.meta_var(paged(slot))
                            filters.add(i, column, pages, (page, offset, first + column))
                    filters.add(num_taps, column, x, (token, first + column))
                    filters.store(out, (token, first + column))

            first: T.int32 = T.truncmod(item, blocks) * BLOCK
            count = T.min(BLOCK, channels - first)
            for chunk in range(T.truncdiv(count, filters.chunk)):
                filters.load(first, chunk * filters.chunk)
            begin = T.truncdiv(item, blocks) * TOKENS
            for token in range(begin, T.min(begin + TOKENS, num_tokens)):
                lowest = 0
                for i in T.unroll(num_taps):
                    taps[i] = tap_slots[token, i]
                    lowest = T.min(lowest, taps[i])
                ahead = T.min(token + AHEAD, num_tokens - 1)
                if lowest >= 0:
                    convolve(token, ahead, first, count, True)
                else:
                    convolve(token, ahead, first, count, False)

    return causal_conv
