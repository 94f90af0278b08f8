# SPDX-License-Identifier: Apache-2.0
"""`AltUp` and `PerLayerInputs`: what Gemma 3n and Gemma 4 have beside the blocks of a decoder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AltUp:
    """Alternating updates: several residual streams, of which each layer computes one.

    A layer predicts all streams from those before it, computes the active one, and corrects the
    others by what it changed.

    Parameters
    ----------
    num_streams : int
    active : int
        The stream that layers compute.
    laurel_rank : int
        Width of the low-rank product beside attention (LAuReL).
    scales_output : bool
        Whether the active stream is multiplied by a weight for each feature before it is multiplied
        with the per-layer inputs.
    """

    num_streams: int
    active: int
    laurel_rank: int
    scales_output: bool = True


@dataclass(frozen=True)
class PerLayerInputs:
    """Per-layer embeddings (PLE): rows of a second table of embeddings, a part for each layer.

    Parameters
    ----------
    width : int
        Number of features that a layer gets.
    vocab_size : int
        Rows of the table. Tokens beyond it get row 0.
    """

    width: int
    vocab_size: int
