# SPDX-License-Identifier: Apache-2.0
"""Scenarios of a cache, and the distance of the logits from those of transformers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .families import Family
from .session import Session

# A chain and two branches: node 0 is the root, 3 hangs from 1, 5 from 4.
_PARENTS = [-1, 0, 0, 1, 0, 4]
_LEAF, _PATH = 3, (0, 1, 3)


class Check:
    """Runs scenarios on a session and keeps the largest error of each.

    An error is the largest difference of a logit, over the largest logit of the row's reference.
    """

    def __init__(self, family: Family, session: Session, logits: Callable, seed: int):
        self._family, self._session, self._logits = family, session, logits
        self._rng = np.random.default_rng(seed)
        self.errors: dict[str, float] = {}

    def run(self) -> dict[str, float]:
        """All scenarios, in an order that leaves sequences for the later ones."""
        session = self._session
        session.add(0)
        session.add(1)
        self._extend("prefill", {0: 37, 1: 21})
        session.add(2)
        for length in (16, 1, 15, 40, 9):
            self._extend("chunks", {2: length})
        for _ in range(3):
            self._decode("decode", [2, 0, 1])
        if self._family.is_hybrid:
            self._fork_and_pop_steps()
        elif self._family.window is None:
            self._fork_and_pop()
        session.add(5)
        self._extend("long", {5: 300, 0: 3})
        self._extend("long", {5: 60})
        self._decode("long", [5, 0])
        if self._family.has_trees:  # last, as TVM's cache fails in the middle of it
            self._tree()
        for seq in [*session.tokens]:
            session.remove(seq)
        return self.errors

    def _fork_and_pop(self) -> None:
        session = self._session
        session.fork(0, 3, 20)
        session.fork(1, 4, -1)
        self._decode("fork", [0, 3, 4, 1])
        self._extend("fork", {3: 11, 0: 2})
        session.pop(2, 50)
        session.pop(1, 3)
        self._decode("pop", [2, 1])
        self._extend("pop", {2: 30})
        session.remove(0)
        self._decode("fork", [3])
        session.add(0)
        self._extend("fork", {0: 18})

    def _fork_and_pop_steps(self) -> None:
        """Forks and pops at ends of steps, where an RNN state keeps snapshots."""
        session = self._session
        session.fork(0, 3, len(session.tokens[0]) - 2)
        session.fork(1, 4, -1)
        self._decode("fork", [0, 3, 4, 1])
        session.pop(2, 2)
        session.pop(1, 3)
        self._decode("pop", [2, 1])
        self._extend("pop", {2: 30})

    def _tree(self) -> None:
        session = self._session
        trees = {seq: (self._draw(len(_PARENTS)), _PARENTS) for seq in (0, 2)}
        rows = iter(session.verify(trees))
        for seq, (tokens, parents) in trees.items():
            for node in range(len(parents)):
                path = [tokens[each] for each in _path_to(node, parents)]
                self._compare("tree", next(rows), session.tokens[seq] + path)
        accepted = {
            seq: (_LEAF, [tokens[node] for node in _PATH]) for seq, (tokens, _) in trees.items()
        }
        session.commit(accepted)
        self._decode("tree", [0, 2])

    def _draw(self, count: int) -> list[int]:
        return self._rng.integers(1, self._family.vocab_size, count).tolist()

    def _extend(self, name: str, lengths: dict[int, int]) -> None:
        chunks = {seq: self._draw(length) for seq, length in lengths.items()}
        steps = [chunks]
        if self._family.is_hybrid:
            steps = [{seq: chunk} for seq, chunk in chunks.items()]
        for step in steps:
            for seq, length, row in self._session.extend(step):
                self._compare(name, row, self._session.tokens[seq], length)

    def _decode(self, name: str, sequences: list[int]) -> None:
        batches = [sequences] if self._family.decodes_batches else [[seq] for seq in sequences]
        for batch in batches:
            tokens = dict(zip(batch, self._draw(len(batch)), strict=True))
            for seq, row in zip(batch, self._session.decode(tokens), strict=True):
                self._compare(name, row, self._session.tokens[seq])

    def _compare(self, name: str, row: np.ndarray, tokens: list[int], end: int | None = None):
        expected = self._logits(tokens)[(end or len(tokens)) - 1]
        error = float(np.abs(row - expected).max() / np.abs(expected).max())
        worst = self.errors.get(name, 0.0)
        self.errors[name] = error if np.isnan(error) else max(worst, error)


def _path_to(node: int, parents: list[int]) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path
