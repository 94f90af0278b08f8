# SPDX-License-Identifier: Apache-2.0
"""torch's scaled_dot_product_attention on dense K and V.

It takes sequences of one shape only: a batch of several shapes is as many calls. K and V of a
sequence lie in one piece, so there are no pages to follow.
"""

from __future__ import annotations

import torch

from bench_peers.peer import Prepared, together
from bench_peers.torch_tensors import TorchPeer, to_numpy, to_torch

attend = torch.nn.functional.scaled_dot_product_attention


class TorchSdpa(TorchPeer):
    """torch's attention with ``enable_gqa``."""

    folds = False

    def prepare(self, case, inputs, dtype, heads) -> Prepared:
        return together([self._part(*part) for part in inputs.parts()])

    def _part(self, q, k, v) -> Prepared:
        batch, rows, query_heads, dim = q.shape
        context, kv_heads = k.shape[1:3]
        group = query_heads // kv_heads if self.folds else 1
        q, k, v = (to_torch(x.swapaxes(1, 2)) for x in (q, k, v))  # [batch, heads, rows, dim]
        q = q.reshape(batch, query_heads // group, group * rows, dim)
        options = {} if self.folds else {"enable_gqa": True}
        if rows == context and group == 1:
            options["is_causal"] = True
        elif rows > 1:
            seen = torch.ones(rows, context, dtype=torch.bool).tril(context - rows)
            options["attn_mask"] = seen.repeat(group, 1)
        result = []

        def run():
            result[:] = [attend(q, k, v, **options)]

        def output():
            o = result[0].reshape(batch, query_heads, rows, dim).transpose(1, 2)
            return to_numpy(o.reshape(batch * rows, query_heads, dim))

        return Prepared(run, output)


class TorchFolded(TorchSdpa):
    """With the query heads of a group as further rows of its KV head, which K and V need not be
    read (or repeated) again for: the fair baseline where a step has few rows.
    """

    folds = True
