# SPDX-License-Identifier: Apache-2.0
"""An exact simulation of a least-recently-used prefix cache of a given number of pages.

The simulation follows the schedule of a run: when requests were admitted, how far each step brought
them, and when they finished. It keeps one page for each page of text. Pages that running requests
use are held; the others are evicted in the order of their last use, the end of a text before its
beginning. It shares no code and no data structure with the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


class TextPage:
    """A page of text behind another one.

    Parameters
    ----------
    tokens : tuple of int
        As many as a page has slots, or fewer: the end of a finished text.
    parent : TextPage, optional
    """

    __slots__ = ("children", "num_users", "parent", "tokens")

    def __init__(self, tokens: tuple[int, ...], parent: TextPage | None):
        self.tokens, self.parent = tokens, parent
        self.children: dict[tuple[int, ...], TextPage] = {}
        self.num_users = 0


@dataclass
class Running:
    """A request that is running: the pages of text that it holds, and pages of its own."""

    text: Sequence[int]
    length: int = 0
    pages: list[TextPage] = field(default_factory=list)
    num_own: int = 0
    begins_in: TextPage | None = None  # it is held until the first step has copied it


class LruOracle:
    """A pool of pages with the texts that they hold.

    Parameters
    ----------
    num_pages, page_size : int
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self.root = TextPage((), None)
        self.num_held = 0
        self.cached: OrderedDict[TextPage, None] = OrderedDict()  # the least recently used first
        self.running: dict[int, Running] = {}
        self.num_missing = 0  # pages that did not fit

    def add(self, key: int, prompt: Sequence[int], text: Sequence[int]) -> int:
        """Begin a request; return how many tokens of its prompt are reused.

        Parameters
        ----------
        key : int
        prompt : sequence of int
            All but its last token can be reused.
        text : sequence of int
            The prompt and what follows it.
        """
        request = Running([int(token) for token in text])
        limit, node, size = len(prompt) - 1, self.root, self.page_size
        while (child := node.children.get(self._page(request, len(request.pages)))) is not None:
            if (len(request.pages) + 1) * size > limit:
                break
            node = child
            request.pages.append(node)
        begin = len(request.pages) * size
        rest = tuple(request.text[begin : min(begin + size, limit)])
        common = 0
        for tokens, child in node.children.items():
            count = _num_common(tokens, rest)
            if count > common:
                common, request.begins_in = count, child
        request.length = begin + common
        for page in request.pages:
            self._hold(page)
        if request.begins_in is not None:
            self._hold(request.begins_in)
        self.running[key] = request
        return request.length

    def step(self, lengths: dict[int, int]) -> None:
        """Append to requests, up to these lengths, and let others find their full pages.

        Parameters
        ----------
        lengths : key -> length of the text
        """
        for key, length in lengths.items():
            request = self.running[key]
            request.length = max(request.length, length)
            need = -(-request.length // self.page_size) - len(request.pages)
            while request.num_own < need:
                self._make_room()
                request.num_own += 1
                self.num_held += 1
            if request.begins_in is not None:
                self._release(request.begins_in)
                request.begins_in = None

    def publish(self, key: int, length: int) -> None:
        """Let others find the full pages of a request, up to this length."""
        request = self.running[key]
        while (len(request.pages) + 1) * self.page_size <= length:
            parent = request.pages[-1] if request.pages else self.root
            tokens = self._page(request, len(request.pages))
            page = parent.children.get(tokens)
            if page is None:
                self._drop_beginning(parent, tokens)
                page = parent.children[tokens] = TextPage(tokens, parent)
            # What has been computed twice is kept once.
            request.num_own -= 1
            self.num_held -= 1
            self._hold(page)
            request.pages.append(page)

    def finish(self, key: int, is_complete: bool = True) -> None:
        """End a request. Others find its whole text if it is complete."""
        request = self.running[key]
        if is_complete:
            self.publish(key, request.length)
        self.num_held -= request.num_own
        parent = request.pages[-1] if request.pages else self.root
        rest = tuple(request.text[len(request.pages) * self.page_size : request.length])
        if is_complete and rest and not any(c[: len(rest)] == rest for c in parent.children):
            self._drop_beginning(parent, rest)
            page = parent.children[rest] = TextPage(rest, parent)
            self.cached[page] = None
        if request.begins_in is not None:
            self._release(request.begins_in)
        for page in reversed(request.pages):
            self._release(page)
        del self.running[key]

    def _page(self, request: Running, index: int) -> tuple[int, ...]:
        begin = index * self.page_size
        return tuple(request.text[begin : begin + self.page_size])

    def _hold(self, page: TextPage) -> None:
        page.num_users += 1
        if page.num_users == 1:
            self.cached.pop(page, None)
            self.num_held += 1

    def _release(self, page: TextPage) -> None:
        page.num_users -= 1
        if page.num_users == 0:
            self.num_held -= 1
            if page.parent is not None:
                self.cached[page] = None

    def _make_room(self) -> None:
        while self.num_held + len(self.cached) >= self.num_pages:
            if not self.cached:
                self.num_missing += 1
                return
            page, _ = self.cached.popitem(last=False)
            self._forget(page)

    def _drop_beginning(self, parent: TextPage, tokens: tuple[int, ...]) -> None:
        """Drop the page that ends where this longer one goes on."""
        for child in list(parent.children.values()):
            if len(child.tokens) < len(tokens) and tokens[: len(child.tokens)] == child.tokens:
                self.cached.pop(child, None)
                self._forget(child)  # if somebody uses it, it is gone when they release it

    @staticmethod
    def _forget(page: TextPage) -> None:
        assert page.parent is not None and not page.children
        del page.parent.children[page.tokens]
        page.parent = None


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def oracle_hits(
    events: Sequence[tuple], prompts: Sequence[np.ndarray], texts: Sequence[np.ndarray], pool: tuple
) -> tuple[dict[int, int], int]:
    """Follow a schedule.

    Parameters
    ----------
    events : sequence of tuples
        ``("add", i)``, ``("refuse", i)``: it was added and removed again, ``("step", {i:
        length})``, ``("publish", {i: length})`` and ``("finish", i)``, as `replay` notes.
    prompts, texts : sequence of int arrays
        Of each request.
    pool : (num_pages, page_size)

    Returns
    -------
    dict, int
        The reused tokens of each request, and how many pages did not fit.
    """
    oracle, hits = LruOracle(*pool), {}
    for kind, what in events:
        if kind == "add":
            hits[what] = oracle.add(what, prompts[what], texts[what])
        elif kind == "refuse":
            oracle.finish(what, is_complete=False)
        elif kind == "step":
            oracle.step(what)
        elif kind == "publish":
            for key, length in what.items():
                oracle.publish(key, length)
        else:
            oracle.finish(what)
    return hits, oracle.num_missing
