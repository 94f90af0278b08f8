# SPDX-License-Identifier: Apache-2.0
"""What layers with a window still have of a sequence, by the rule of the runtime object."""

POPPABLE = 16  # positions before the window that are kept as well


class KeptPositions:
    """From where on a group of layers keeps the positions of each sequence.

    They are positions of the text: where a sequence has a window of its own, that differs from
    those that it holds.
    """

    def __init__(self, window: int, page_size: int):
        self.window, self.page_size, self.first = window, page_size, {}

    def visible(self, length: int) -> int:
        """First position that the next row sees."""
        return max(0, length - self.window + 1) if self.window else 0

    def slide(self, seq_id: int, length: int) -> None:
        """So many positions of the text are committed."""
        self.first[seq_id] = self.first_after(seq_id, length)

    def first_after(self, seq_id: int, length: int) -> int:
        """First position that is kept then."""
        keep = max(0, self.visible(length) - POPPABLE) // self.page_size * self.page_size
        return max(self.first[seq_id], keep)

    def can_continue(self, seq_id: int, length: int) -> bool:
        """Whether what the row after `length` sees is still there."""
        return length == 0 or self.visible(length) >= self.first[seq_id]

    def num_pages(self, seq_id: int, length: int) -> int:
        return -(-length // self.page_size) - self.first[seq_id] // self.page_size
