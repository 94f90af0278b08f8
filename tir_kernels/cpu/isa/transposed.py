# SPDX-License-Identifier: Apache-2.0
"""A buffer as a matrix whose rows are its columns."""

from __future__ import annotations

from typing import NamedTuple


class Transposed(NamedTuple):
    """A matrix whose rows are the columns of a buffer."""

    buffer: object

    def __getitem__(self, at: tuple):
        row, column = at
        return self.buffer[column, row]
