# SPDX-License-Identifier: Apache-2.0
"""`StepRows`: what the layers of a step have in common besides the rows between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm.relax.frontend import nn


@dataclass
class StepRows:
    """What the layers of a step have in common.

    Parameters
    ----------
    inputs : tensor ``[n, row_width]``, optional
        The rows that `Decoder.embed` made, with the inputs of each layer.
    chosen : tensor, optional
        The positions that the last indexer chose for each row.
    is_decode : bool
        Whether layers with a budget keep to it: not in a prefill, also not in one of single rows.
    shared_kv : dict
        K ``[n, num_kv_heads * head_dim]`` and V of layers to which later ones attend, by layer, as
        the pages of the cache hold them.
    """

    inputs: nn.Tensor | None = None
    chosen: nn.Tensor | None = None
    is_decode: bool = True
    shared_kv: dict[int, tuple[nn.Tensor, nn.Tensor]] = field(default_factory=dict)
