# SPDX-License-Identifier: Apache-2.0
"""Drafts by prompt lookup: tokens that followed earlier occurrences of the text's last n-gram.

Several such continuations form a token tree, which the model verifies in one step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

MATCH_LENGTHS = (8, 4, 2)  # lengths of the n-grams to look up, longest first
LONGEST_MATCH = 16  # longer matches do not predict better
NUM_MATCHES = 6
MIN_CHANCE = 0.2  # minimum probability of a draft that is worth a row of the step


class HitRates:
    """The rate at which the token after a match was right, by the length of the match."""

    def __init__(self) -> None:
        self._hits, self._tries = ([n] * (LONGEST_MATCH + 1) for n in (1, 2))

    def __getitem__(self, length: int) -> float:
        length = min(length, LONGEST_MATCH)
        return self._hits[length] / self._tries[length]

    def record(self, length: int, is_hit: bool) -> None:
        """Record whether a predicted token was right."""
        length = min(length, LONGEST_MATCH)
        self._hits[length] += is_hit
        self._tries[length] += 1


@dataclass
class Draft:
    """A token tree whose root is the last token of the text, which the cache does not hold yet.

    Parameters
    ----------
    tokens, parents : list of int
        Token and parent of each node. Parents precede their children; the root has -1.
    guesses : dict of int to (int, int)
        For each node, the token that most likely follows, drafted or not, and the length of the
        match that predicts it.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    guesses: dict[int, tuple[int, int]] = field(default_factory=dict)

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` with this token, or None."""
        for child in range(node + 1, len(self.tokens)):
            if self.parents[child] == node and self.tokens[child] == token:
                return child
        return None


class PromptLookup:
    """The text of one continuation, with an index of its n-grams.

    Parameters
    ----------
    tokens : sequence of int
        The text so far.
    rates : HitRates
        Can be shared by the texts of a run.
    """

    def __init__(self, tokens: Sequence[int], rates: HitRates):
        self.tokens: list[int] = []
        self.rates = rates
        self._after: dict[int, dict[tuple[int, ...], list[int]]] = {
            length: defaultdict(list) for length in MATCH_LENGTHS
        }
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token to the text."""
        self.tokens.append(token)
        for length, after in self._after.items():
            if len(self.tokens) >= length:
                after[tuple(self.tokens[-length:])].append(len(self.tokens))

    def matches(self) -> list[tuple[int, int]]:
        """Return earlier occurrences of the end of the text, best first.

        Returns
        -------
        list of (length, position)
            Number of matching tokens, and the position after them. Longer matches come first, then
            later ones.
        """
        found: dict[int, int] = {}
        for length, after in self._after.items():
            positions = after.get(tuple(self.tokens[-length:]), [])
            for position in reversed(positions[-NUM_MATCHES - 1 : -1]):  # the last is the end
                found.setdefault(position, 0)
            if len(found) >= NUM_MATCHES:
                break
        ranked = sorted(((self._match_length(p), p) for p in found), reverse=True)
        return ranked[:NUM_MATCHES]

    def _match_length(self, position: int) -> int:
        tokens, end, length = self.tokens, len(self.tokens), 0
        limit = min(position, LONGEST_MATCH)
        while length < limit and tokens[position - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def draft(self, max_nodes: int, max_depth: int, *, branches: bool = True) -> Draft:
        """Return the most probable continuations as a token tree.

        Parameters
        ----------
        max_nodes : int
            Maximum number of drafted tokens.
        max_depth : int
            Maximum number of drafted tokens on a path.
        branches : bool
            Whether a node may have several children; otherwise the best match alone is drafted.
        """
        end = len(self.tokens)
        tree = Draft([self.tokens[-1]])
        chances, rest = [1.0], [1.0]  # of a node; of none of its children so far
        children: list[dict[int, int]] = [{}]
        for length, position in self.matches()[: None if branches else 1]:
            node, period = 0, end - position
            for depth in range(max_depth):
                # Beyond the end of the text, assume that it repeats.
                token = self.tokens[position + depth % period]
                tree.guesses.setdefault(node, (token, length + depth))
                child = children[node].get(token)
                if child is None:
                    chance = rest[node] * self.rates[length + depth]
                    if chance < MIN_CHANCE:
                        break
                    rest[node] -= chance
                    child = children[node][token] = len(tree.tokens)
                    tree.tokens.append(token)
                    tree.parents.append(node)
                    chances.append(chance)
                    rest.append(chance)
                    children.append({})
                node = child
        return _most_probable(tree, chances, max_nodes)

    def record(self, draft: Draft, node: int, token: int) -> None:
        """Record the token that followed a node of a draft."""
        if node in draft.guesses:
            guess, length = draft.guesses[node]
            self.rates.record(length, guess == token)


def _most_probable(tree: Draft, chances: list[float], max_nodes: int) -> Draft:
    """Keep the root and the `max_nodes` most probable nodes, which form a tree."""
    ranked = sorted(range(len(chances)), key=lambda node: -chances[node])
    kept = sorted(ranked[: max_nodes + 1])
    index = {node: i for i, node in enumerate(kept)}
    return Draft(
        [tree.tokens[node] for node in kept],
        [-1, *(index[tree.parents[node]] for node in kept[1:])],
        {index[node]: guess for node, guess in tree.guesses.items() if node in index},
    )
