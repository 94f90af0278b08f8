# SPDX-License-Identifier: Apache-2.0
"""Drafts by prompt lookup: what followed where the text read before as it does at its end now.

Several such continuations are merged into a token tree, which the model verifies in one step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

MATCH_LENGTHS = (8, 4, 2)  # of the n-grams that are looked up, longest first
LONGEST_MATCH = 16  # more tokens that agree tell no more
NUM_MATCHES = 6
LEAST_CHANCE = 0.2  # of a draft that is worth its row in the step


class HitRates:
    """How often the token after a match was the right one, by the length of the match."""

    def __init__(self) -> None:
        self._hits, self._tries = ([n] * (LONGEST_MATCH + 1) for n in (1, 2))

    def __getitem__(self, length: int) -> float:
        length = min(length, LONGEST_MATCH)
        return self._hits[length] / self._tries[length]

    def record(self, length: int, is_hit: bool) -> None:
        """Learn from a token that has become known."""
        length = min(length, LONGEST_MATCH)
        self._hits[length] += is_hit
        self._tries[length] += 1


@dataclass
class Draft:
    """A token tree; its root is the last token of the text, which the cache does not hold yet.

    Parameters
    ----------
    tokens, parents : list of int
        Of each node; parents before their children, -1 for the root.
    guesses : dict of int to (int, int)
        By node, the token that was most likely to follow, drafted or not, and the length of the
        match that said so.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    guesses: dict[int, tuple[int, int]] = field(default_factory=dict)

    def child(self, node: int, token: int) -> int | None:
        """The node of `token` below `node`, if it was drafted."""
        for child in range(node + 1, len(self.tokens)):
            if self.parents[child] == node and self.tokens[child] == token:
                return child
        return None


class PromptLookup:
    """The text of one continuation, and where its n-grams are.

    Parameters
    ----------
    tokens : sequence of int
        The text so far.
    rates : HitRates
        May be shared by the texts of a run.
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
        """Let the text grow."""
        self.tokens.append(token)
        for length, after in self._after.items():
            if len(self.tokens) >= length:
                after[tuple(self.tokens[-length:])].append(len(self.tokens))

    def matches(self) -> list[tuple[int, int]]:
        """Where the text read as at its end: (tokens that agree, position after them), best first.

        A longer match is better, then a later one.
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
        most = min(position, LONGEST_MATCH)
        while length < most and tokens[position - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def draft(self, max_nodes: int, max_depth: int) -> Draft:
        """The most probable continuations, as a token tree.

        Parameters
        ----------
        max_nodes : int
            Most drafted tokens.
        max_depth : int
            Most tokens of a path.
        """
        end = len(self.tokens)
        tree = Draft([self.tokens[-1]])
        chances, rest = [1.0], [1.0]  # of a node; and that none of its children so far comes next
        children: list[dict[int, int]] = [{}]
        for length, position in self.matches():
            node, period = 0, end - position
            for depth in range(max_depth):
                # Where the text ends, it goes on as it does from there.
                token = self.tokens[position + depth % period]
                tree.guesses.setdefault(node, (token, length + depth))
                child = children[node].get(token)
                if child is None:
                    chance = rest[node] * self.rates[length + depth]
                    if chance < LEAST_CHANCE:
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
        """Learn from the token that has followed a node of a draft."""
        if node in draft.guesses:
            guess, length = draft.guesses[node]
            self.rates.record(length, guess == token)


def _most_probable(tree: Draft, chances: list[float], max_nodes: int) -> Draft:
    """Keep the root and as many nodes; no node is more probable than its parent."""
    ranked = sorted(range(len(chances)), key=lambda node: -chances[node])
    kept = sorted(ranked[: max_nodes + 1])
    index = {node: i for i, node in enumerate(kept)}
    return Draft(
        [tree.tokens[node] for node in kept],
        [-1, *(index[tree.parents[node]] for node in kept[1:])],
        {index[node]: guess for node, guess in tree.guesses.items() if node in index},
    )
