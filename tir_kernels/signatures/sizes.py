# SPDX-License-Identifier: Apache-2.0
"""The sizes in the shapes of arguments."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ..script import name_value

# Sizes that a call decides, and what errors call them.
VARIABLES = {
    "T": "num_rows",  # of Q, or of a step
    "B": "batch_size",  # sequences, or shared segments
    "B + 1": "num_starts",  # CSR offsets
    "S": "num_columns",  # rows of ragged K and V
    "P": "num_pages",  # of the pool
    "N": "num_page_ids",
    "M": "num_nodes",  # of trees
    "R": "num_row_ids",  # rows of shared segments
    "L": "num_lengths",
    "C": "num_lists",  # of blocks, of a row
    "W": "list_width",
}


class Sizes(dict):
    """The sizes of a call, by the letters that shapes have.

    Parameters
    ----------
    of_spec : dict
        Sizes that a spec decides.
    has_batch_size : bool
        Whether an array of B elements tells B. Otherwise CSR offsets do.
    has_one_row : bool
        Whether each sequence has one row of Q: then T is B.
    """

    def __init__(self, of_spec: dict[str, int], *, has_batch_size: bool, has_one_row: bool):
        super().__init__(of_spec)
        self.has_batch_size, self.has_one_row = has_batch_size, has_one_row

    def __missing__(self, letter: str) -> Any:
        if letter.isdigit():
            return int(letter)
        if letter == "T" and self.has_one_row:
            size = self["B"]
        elif letter == "B" and not self.has_batch_size:
            size = self["B + 1"] - 1
        elif letter == "B + 1" and self.has_batch_size:
            size = self["B"] + 1
        else:
            size = name_value(VARIABLES[letter], T.int32())
        self[letter] = size
        return size
