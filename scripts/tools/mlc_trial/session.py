# SPDX-License-Identifier: Apache-2.0
"""A compiled model with its cache, called as mlc-llm's engine calls it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm_ffi import Shape

MAX_BATCH, MAX_TOKENS, MAX_CHUNK, PAGE_SIZE = 8, 4096, 512, 16
MAX_HISTORY = 4  # snapshots of an RNN state


def call(name: str, *arguments: Any) -> Any:
    """Call one of TVM's built-in functions."""
    return tvm_ffi.get_global_func(f"vm.builtin.{name}")(*arguments)


class Session:
    """Sequences in a cache, by their tokens.

    Parameters
    ----------
    library : Path
        What mlc-llm compiled.
    weights : list of tvm.runtime.Tensor
    window : int, optional
        The sliding window of each sequence.
    is_hybrid : bool
        Whether an RNN state goes beside the cache.
    """

    def __init__(
        self, library: Path, weights: list, window: int | None = None, is_hybrid: bool = False
    ):
        self._functions = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
        self._weights, self._window = weights, window
        capacities = (MAX_BATCH, MAX_TOKENS, MAX_CHUNK, PAGE_SIZE, int(window is not None))
        create = self._functions["create_tir_paged_kv_cache"]
        self.cache = create(*(Shape([each]) for each in capacities))
        self._states = [self.cache]  # the engine calls each of them
        if is_hybrid:
            create = self._functions["create_rnn_state"]
            self._states.append(create(Shape([MAX_BATCH]), Shape([MAX_HISTORY])))
        self.tokens: dict[int, list[int]] = {}

    def add(self, seq: int) -> None:
        self._call("add_sequence", seq)
        if self._window is not None:
            name = "attention_kv_cache_enable_sliding_window_for_seq"
            call(name, self.cache, seq, self._window, 0)
        self.tokens[seq] = []

    def fork(self, parent: int, child: int, position: int) -> None:
        self._call("fork_sequence", parent, child, position)
        self.tokens[child] = self.tokens[parent][: None if position < 0 else position]

    def pop(self, seq: int, count: int) -> None:
        self._call("popn", seq, count)
        del self.tokens[seq][len(self.tokens[seq]) - count :]

    def remove(self, seq: int) -> None:
        self._call("remove_sequence", seq)
        del self.tokens[seq]

    def extend(self, chunks: dict[int, list[int]]) -> list[tuple[int, int, np.ndarray]]:
        """Append a chunk to each sequence.

        Returns
        -------
        list of (sequence, length, logits)
            Of some rows of each chunk, the last one among them: the tokens that the row has seen,
            and ``[vocab]``. The engine asks for no more rows than a batch may have.
        """
        has_past = any(self.tokens[seq] for seq in chunks)
        name = "batch_prefill"
        if has_past and self._functions.module.implements_function("batch_extend"):
            name = "batch_extend"
        rows = [token for chunk in chunks.values() for token in chunk]
        wanted, positions, start = [], [], 0
        for seq, chunk in chunks.items():
            count = min(len(chunk), MAX_BATCH // len(chunks))
            for row in np.linspace(len(chunk) - 1, 0, count, dtype=int)[::-1]:
                wanted.append((seq, len(self.tokens[seq]) + int(row) + 1))
                positions.append(start + row)
            start += len(chunk)
        self._begin(chunks)
        where = tvm.runtime.tensor(np.array(positions, dtype="int32"))
        logits = self._run(name, self._embed(rows, (1, len(rows))), where)
        for seq, chunk in chunks.items():
            self.tokens[seq] += chunk
        return [(*each, row) for each, row in zip(wanted, logits, strict=True)]

    def decode(self, tokens: dict[int, int]) -> np.ndarray:
        """One token for each sequence; returns ``[batch, vocab]``."""
        self._begin({seq: [token] for seq, token in tokens.items()})
        logits = self._run("batch_decode", self._embed([*tokens.values()], (len(tokens), 1)))
        for seq, token in tokens.items():
            self.tokens[seq].append(token)
        return logits

    def verify(self, trees: dict[int, tuple[list[int], list[int]]]) -> np.ndarray:
        """Run a token tree on each sequence, as tokens and parents; they stay uncommitted."""
        rows = [token for tokens, _ in trees.values() for token in tokens]
        parents = [parent for _, tree in trees.values() for parent in tree]
        self._begin({seq: tokens for seq, (tokens, _) in trees.items()}, Shape(parents))
        return self._run("batch_verify", self._embed(rows, (1, len(rows))))

    def commit(self, accepted: dict[int, tuple[int, list[int]]]) -> None:
        """Keep the path to one leaf of each tree: the leaf, and the tokens on the path."""
        leaves = Shape([leaf for leaf, _ in accepted.values()])
        name = "attention_kv_cache_commit_accepted_token_tree_nodes"
        call(name, self.cache, Shape([*accepted]), leaves)
        for seq, (_, path) in accepted.items():
            self.tokens[seq] += path

    def _call(self, name: str, *arguments: Any) -> None:
        for state in self._states:
            call(f"kv_state_{name}", state, *arguments)

    def _begin(self, chunks: dict[int, list[int]], *tree: Shape) -> None:
        lengths = Shape([len(chunk) for chunk in chunks.values()])
        self._call("begin_forward", Shape([*chunks]), lengths, *tree)

    def _embed(self, rows: Sequence[int], shape: tuple[int, int]) -> tvm.runtime.Tensor:
        tokens = tvm.runtime.tensor(np.array(rows, dtype="int32"))
        embedded = self._functions["embed"](tokens, self._weights)
        # A view, as the engine takes one.
        return call("reshape", embedded, Shape([*shape, embedded.shape[-1]]))

    def _run(self, name: str, *arguments: Any) -> np.ndarray:
        logits = self._functions[name](*arguments, *self._states, self._weights)[0]
        self._call("end_forward")
        return logits.numpy().reshape(-1, logits.shape[-1])
