# SPDX-License-Identifier: Apache-2.0
"""The part of `KVCache` that takes hints about texts that will be needed again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .._checks import check_choice
from .._functions import as_int, global_function
from .prefix_lookup import as_salt, as_tokens
from .recurrence import CacheRecurrence


class CacheHints(CacheRecurrence):
    """The methods of `KVCache` that say which texts come again, and which do not."""

    __slots__ = ()

    def retain(
        self,
        tokens: Sequence[int],
        salt: bytes = b"",
        ttl: float | None = None,
        priority: int = 50,
    ) -> int:
        """Evict other pages before those of a text.

        The pages stay available: a step that finds no others takes them. With tiers below the
        pages, host memory evicts other pages first, too. Pages that are computed or loaded later
        are retained when they come.

        Parameters
        ----------
        tokens : sequence of int
            The text; its full pages are retained. In layers with a window these are the pages that
            a prompt needs which begins with all of it.
        salt : bytes
            As for `add_sequence`.
        ttl : float, optional
            Seconds after which the hint ends; None: it ends with `release`. A hit does not make it
            longer.
        priority : int
            From 1 to 100. Pages of a lower one go first; among pages of the same one, the least
            recently used. A page that several hints cover has the highest of their priorities.

        Returns
        -------
        int
            A handle for `release`. Each call makes a hint of its own.

        Raises
        ------
        ValueError
            If `ttl`, `priority` or a token id is out of range, or a step has begun.
        """
        arguments = as_tokens(tokens), as_salt(salt), as_int("priority", priority), _seconds(ttl)
        return global_function("pagedkv.prefix_retain")(self, *arguments)

    def pin(self, tokens: Sequence[int], salt: bytes = b"", ttl: float | None = None) -> int:
        """Keep the pages of a text in the pool until the pin ends: they are never evicted.

        Pinned pages count as used, as if a sequence held them. Pages that are computed or loaded
        later are pinned when they come.

        Parameters
        ----------
        tokens : sequence of int
        salt : bytes
        ttl : float, optional
            As for `retain`.

        Returns
        -------
        int
            A handle for `release`. A page stays pinned until its last pin has ended.

        Raises
        ------
        CacheFullError
            If all pins together would need more than half of the pages of a pool.
        ValueError
            If `ttl` or a token id is out of range, or a step has begun.
        """
        arguments = as_tokens(tokens), as_salt(salt), _seconds(ttl)
        return global_function("pagedkv.prefix_pin")(self, *arguments)

    def release(self, hint: int) -> bool:
        """End a hint of `retain` or `pin`; its pages are evicted as others are.

        Parameters
        ----------
        hint : int
            What `retain` or `pin` returned.

        Returns
        -------
        bool
            False if the hint had ended already, by its `ttl`, `clear` or `forget_prefixes`.

        Raises
        ------
        KeyError
            If the cache never returned this handle.
        """
        return bool(global_function("pagedkv.prefix_release")(self, as_int("hint", hint)))

    def demote(self, tokens: Sequence[int], salt: bytes = b"", tier: str | None = None) -> int:
        """Evict the pages that only this text has before all others.

        Call it for a text that will not come soon, or not at all. Pages that another text, a
        sequence or a hint needs stay as they are. A lookup finds the pages while they are there.

        Parameters
        ----------
        tokens : sequence of int
        salt : bytes
            As for `add_sequence`.
        tier : {"host", "store"}, optional
            Where the text is to be found later: its pages are copied to host memory now, and with
            "store" evicted from there first, too. None: "host" if the cache has tiers.

        Returns
        -------
        int
            The number of pages of text that this is about.

        Raises
        ------
        ValueError
            If the cache does not have this tier, if a token id is out of range, or a step has
            begun.
        """
        arguments = as_tokens(tokens), as_salt(salt), tier or ""
        return global_function("pagedkv.prefix_demote")(self, *arguments)

    def prefetch(self, tokens: Sequence[int], salt: bytes = b"", tier: str = "host") -> None:
        """Load the pages of a text into a tier nearer to the layers.

        Parameters
        ----------
        tokens : sequence of int
        salt : bytes
            As for `add_sequence`, and so are the errors.
        tier : {"host", "pool"}
            "host": begin to load pages from the store into host memory, and return at once; a later
            `add_sequence` finds what has arrived. Without a store it does nothing. "pool": copy
            pages that are in host memory to the pool now, as far as there is room; they count as
            the most recently used ones.

        Raises
        ------
        ValueError
            If `tier` is none of these, or for "pool" if a step has begun.
        """
        check_choice("tier", tier, ("host", "pool"))
        name = "pagedkv.prefix_load" if tier == "pool" else "pagedkv.prefix_prefetch"
        global_function(name)(self, as_tokens(tokens), as_salt(salt))


def _seconds(ttl: float | None) -> float:
    return math.inf if ttl is None else float(ttl)
