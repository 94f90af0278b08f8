# SPDX-License-Identifier: Apache-2.0
"""The part of `KVCache` that finds the pages of earlier texts by their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .._functions import STATE, as_int, global_function
from ..stores import close_worker
from .hints import CacheHints
from .page_map import PageMap
from .prefix_lookup import as_salt, as_tokens, locate_prefix
from .tiers import tier_of


class CachePrefix(CacheHints):
    """The methods of `KVCache` that take token ids."""

    __slots__ = ()

    def add_sequence(
        self,
        seq_id: int,
        tokens: Sequence[int] | None = None,
        salt: bytes = b"",
        lookup_timeout: float | None = None,
    ) -> int:
        """Add a sequence; with `tokens`, one that begins with the pages of an earlier text.

        The sequence gets the positions of the longest beginning of `tokens` that the cache still
        has in all layers, but never all of them: at least the last token is to be appended by a
        step. What is reused is what the tokens would have computed, if the model depends on nothing
        but the tokens and what `salt` stands for.

        Parameters
        ----------
        seq_id : int
            Any 64-bit integer that is not in use.
        tokens : sequence of int, optional
            The ids of the prompt's tokens, each a non-negative int32. Without them, the sequence is
            empty.
        salt : bytes
            The namespace: texts with different salts never share pages. Put into it what else K and
            V depend on, such as an adapter or an image, or who may know of the text.
        lookup_timeout : float, optional
            Maximum seconds to wait for pages from the store of a cache with a `prefix_cache`;
            None: as its configuration says. What arrives later is found by later calls.

        Returns
        -------
        int
            The length of the sequence: ``tokens[length:]`` are to be appended.

        Raises
        ------
        ValueError
            If a sequence has this id, or a token id is out of range.
        """
        if tokens is None:
            global_function(STATE + "add_sequence")(self, as_int("seq_id", seq_id))
            return 0
        arguments = as_int("seq_id", seq_id), as_tokens(tokens), as_salt(salt)
        if lookup_timeout is None:
            return global_function("pagedkv.prefix_add")(self, *arguments)
        return global_function("pagedkv.prefix_add_within")(self, *arguments, float(lookup_timeout))

    def forget_prefixes(self) -> None:
        """Forget all texts, in the pages and in host memory: later lookups do not find them.

        Sequences stay, without recorded tokens, and all hints end. Call it when K and V of a text
        change, as with new weights. A store keeps what it has: use another name of the model for
        it.
        """
        global_function("pagedkv.prefix_clear")(self)

    def flush_prefixes(self, timeout: float = 60.0) -> bool:
        """Wait until the store has the pages that are to be written to it.

        Parameters
        ----------
        timeout : float
            Maximum seconds to wait.

        Returns
        -------
        bool
            Whether nothing is left to write.
        """
        tier = tier_of(self)
        if tier is None:
            return True
        global_function("pagedkv.prefix_flush")(self, 0.0)  # what was copied may be written
        # Others may use the cache meanwhile.
        return global_function("pagedkv.tier_flush")(tier, float(timeout))

    def close_prefixes(self, timeout: float = 60.0) -> bool:
        """Write what is pending to the store and close it; the cache can still be used.

        Without this call, the same is done when the cache is freed, in the background.

        Parameters
        ----------
        timeout : float
            Maximum seconds to wait.

        Returns
        -------
        bool
            Whether the store was closed in that time.
        """
        tier = tier_of(self)
        if tier is None:
            return True
        global_function("pagedkv.prefix_flush")(self, 0.0)  # what was copied may be written
        return close_worker(tier, float(timeout))

    def match_prefix(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Return the number of positions that `add_sequence` would reuse for these tokens.

        Parameters
        ----------
        tokens : sequence of int
        salt : bytes
            As for `add_sequence`, and so are the errors.
        """
        return global_function("pagedkv.prefix_match")(self, as_tokens(tokens), as_salt(salt))

    def locate_prefix(
        self, tokens: Sequence[int], salt: bytes = b"", timeout: float = 1.0
    ) -> list[tuple[str, ...]]:
        """Return where the full pages of a text are; nothing is loaded and nothing counts as used.

        Parameters
        ----------
        tokens : sequence of int
        salt : bytes
            As for `add_sequence`, and so are the errors.
        timeout : float
            Maximum seconds to wait for the store, if some pages are in no other tier.

        Returns
        -------
        list of tuples of str
            For each full page of text the first tier that has it, by layer group: "pool",
            "host", "store", or "" where no tier has it. Layers with a window need the last pages of
            a hit only, so "" there may be no miss.

        Raises
        ------
        ValueError
            If `timeout` is negative, or a step has begun.
        """
        return locate_prefix(self, tokens, salt, timeout)

    def draw(
        self,
        path: str | Path | None = None,
        prefixes: Mapping[str, Sequence[int]] | None = None,
        salt: bytes = b"",
    ) -> str:
        """Return the page table of every sequence as text, by layer group.

        Pages for states of recurrent layers follow. An asterisk marks a shared page. A line for
        each of the `prefixes` says which tiers have its full pages.

        Parameters
        ----------
        path : path, optional
            Also write an SVG picture there: the owners of each page, and how full it is, and the
            tier of each page of the prefixes.
        prefixes : mapping of str to sequences of int, optional
            Token ids by the names that the picture gives them.
        salt : bytes
            As for `add_sequence`, of all `prefixes`.
        """
        page_map = PageMap.of(self, prefixes, salt)
        if path is not None:
            Path(path).write_text(page_map.to_svg(), encoding="utf-8")
        return page_map.to_text()

    def record_tokens(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Record the tokens of positions, so that other sequences find their pages.

        `begin_forward` takes the tokens of a step; this method is for positions that came
        otherwise, such as those of `commit_tree` or of a transfer. Full pages are found from now
        on, or when the step ends that appends them; a last page that is not full is found when the
        sequence has been removed.

        Parameters
        ----------
        seq_id : int
            A sequence without a window of its own. If none of its tokens are recorded, its text
            belongs to the namespace ``b""``.
        tokens : sequence of int
            The ids of the tokens behind those that are recorded.

        Raises
        ------
        KeyError
            If there is no such sequence.
        ValueError
            If the sequence does not have that many committed positions, if a layer left one of them
            out of its step, if the sequence has a window, or if a token id is out of range.
        """
        seq_id = as_int("seq_id", seq_id)
        begin = self.num_recorded_tokens(seq_id)
        global_function("pagedkv.prefix_record")(self, seq_id, begin, as_tokens(tokens))

    def num_recorded_tokens(self, seq_id: int) -> int:
        """Return the number of leading positions of a sequence whose tokens are recorded.

        Raises
        ------
        KeyError
            If there is no such sequence.
        """
        return global_function("pagedkv.prefix_length")(self, as_int("seq_id", seq_id))
