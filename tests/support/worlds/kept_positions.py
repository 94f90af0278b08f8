# SPDX-License-Identifier: Apache-2.0
"""Positions that layers with a window keep, by the rule of the runtime object."""

POPPABLE = 16  # positions before the window that are kept as well


class KeptPositions:
    """The first position of each sequence that a layer group keeps.

    They are positions of the text: where a sequence has a window of its own, that differs from
    those that it holds. What the window has left behind is there for forks and pops until its
    pages are reclaimed: `left` has these pages, each with how often the group had reclaimed any
    when it was left. Where that number is still the same, the page must be there.

    A negative window: rows see from the start of their chunk of so many positions.
    """

    def __init__(self, window: int, page_size: int):
        self.window, self.page_size = window, page_size
        self.first: dict[int, int] = {}
        self.left: dict[int, dict[int, int]] = {}

    def begin(self, seq_id: int, first: int = 0) -> None:
        """A sequence that has no positions, or was imported without those before `first`."""
        self.first[seq_id], self.left[seq_id] = first, {}

    def visible(self, length: int) -> int:
        """First position that the next row sees."""
        if self.window < 0:
            return length - length % -self.window
        return max(0, length - self.window + 1) if self.window else 0

    def slide(self, seq_id: int, length: int, num_reclaimed: int) -> None:
        """Slide the window when this many positions of the text are committed."""
        first = self.first_after(seq_id, length)
        for page in range(self.first[seq_id] // self.page_size, first // self.page_size):
            self.left[seq_id][page] = num_reclaimed
        self.first[seq_id] = first

    def receive(self, seq_id: int, begin: int, end: int, num_reclaimed: int) -> None:
        """Positions from `begin` on came from elsewhere; those that no window sees did not."""
        first = self.first[seq_id]
        self.slide(seq_id, end, num_reclaimed)
        if first < self.first[seq_id] and begin < self.first[seq_id]:
            self.left[seq_id] = {}

    def first_after(self, seq_id: int, length: int) -> int:
        """First position that is kept then."""
        keep = self.visible(max(0, length - POPPABLE)) // self.page_size * self.page_size
        return max(self.first[seq_id], keep)

    def first_at(self, seq_id: int, length: int) -> int:
        """First position that is kept after a fork or pop to this length."""
        return min(self.first[seq_id], self.visible(length) // self.page_size * self.page_size)

    def missing(self, seq_id: int, length: int) -> list[int]:
        """Pages that the row after `length` sees and the sequence has left behind."""
        end = min(self.first[seq_id], length)
        begin = self.first_at(seq_id, length)
        return list(range(begin // self.page_size, -(-end // self.page_size)))

    def is_gone(self, seq_id: int, length: int) -> bool:
        """Whether a page that the row after `length` sees never was there."""
        return any(page not in self.left[seq_id] for page in self.missing(seq_id, length))

    def may_be_gone(self, seq_id: int, length: int, num_reclaimed: int) -> bool:
        """Whether such a page may have been reclaimed."""
        left = self.left[seq_id]
        return any(left.get(page, -1) != num_reclaimed for page in self.missing(seq_id, length))

    def fork(self, parent: int, child: int, length: int) -> None:
        """The child shares so many positions of the text."""
        if length == 0:
            return self.begin(child)
        first = self.first_at(parent, length)
        left = self.left[parent]
        self.left[child] = {page: left[page] for page in left if page < first // self.page_size}
        self.first[child] = first

    def pop(self, seq_id: int, length: int) -> None:
        """Pop back to this many committed positions of the text."""
        self.fork(seq_id, seq_id, length)

    def num_pages(self, seq_id: int, length: int) -> int:
        return -(-length // self.page_size) - self.first[seq_id] // self.page_size
