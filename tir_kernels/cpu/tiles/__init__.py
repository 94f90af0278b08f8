# SPDX-License-Identifier: Apache-2.0
"""Attention with tiles of query rows: two engines with one interface.

    q.load(..)                          # Q
    kv.pack(..)                         # a tile of K and V: `POSITIONS` positions
    scores = products.qk(q, kv, view)   # S = Q K^T, of a view: some rows, and what they see
    scores.hide(..)                     # the mask
    weights = softmax.update(scores)    # P = exp2(S - maximum)
    products.pv(o, weights, kv)         # O = O * rescale + P V

| | prefill: `attention/query_tiles.py` | MLA, shared prefixes: `attention/split_tiles.py` |
|---|---|---|
| a row of Q | is a row of a register tile | is a lane of vectors: S and O are transposed |
| tiles of rows | from a queue | split by positions as well |
| Q | `QueryTile` | `LaneQueries` |
| what rows see | `RowBounds`, `TileView` | `LaneMask`, `LaneView` |
| K and V | `KvTile` | `LaneKv` |
| S, P | `TileScores`, `TileWeights` | `LaneScores`, `LaneWeights` |
| softmax, products | `TileSoftmax`, `TileProducts` | `LaneSoftmax`, `LaneProducts`, `AmxProducts` |
| O | `OutputTile` | `LaneSums`, `RowSums` |
"""
