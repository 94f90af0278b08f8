# SPDX-License-Identifier: Apache-2.0
"""What a sequence lacks of the first positions that its receiver requests.

A receiver requests what the next row needs, and what can be popped. A sequence that began with a
prefix hit or a fork may have less: rows of windows from a later position on, and a later state of
recurrent layers. Then these are sent, and pops of the receiver reach back that far only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cache import KVCache
from . import _runtime
from .requests import Request

_NOT_WANTED = -1  # in place of a slot


def without_missing(
    cache: KVCache, seq_id: int, request: Request
) -> tuple[Sequence[int], list[int]]:
    """Return the slots that a sequence is sent to, and the first positions, per group.

    No positions means that the sequence has all that the request asks for, or will have it.
    """
    begin, end = request.begin, request.begin + request.length
    stats = cache.stats()
    num_groups, num_state_groups = len(stats["groups"]), len(stats["state_groups"])
    try:
        parts = _parts_of(request.slots, num_groups, num_state_groups)
    except ValueError:
        return request.slots, []  # marking the sequence says what is wrong
    firsts = _runtime.first_to_send(cache, seq_id, begin, end)
    is_changed = False
    for group, (part, first) in enumerate(zip(parts, firsts, strict=True)):
        if group >= num_groups:
            if first > (part[2] if part[0] else 0):
                parts[group] = [1, part[1] if part[0] else 0, first]
                is_changed = True
        elif part[0] and first > begin + (part[2] if part[1] == _NOT_WANTED else 0):
            parts[group] = _without_first(part, first - begin)
            is_changed = True
    slots = [number for part in parts for number in part]
    return (slots, firsts) if is_changed else (request.slots, [])


def leave_out(
    slots: list[np.ndarray], begin: int, firsts: Sequence[int], pages: Sequence[int]
) -> None:
    """Change the slots of positions, as `expand_map` returns them, to what the sender has.

    Parameters
    ----------
    firsts : sequence of int
        The first position of each layer group, then the length of each state.
    pages : sequence of int
        The page of each state; -1: there is none.
    """
    num_groups = len(slots) - len(pages)
    for group, first in enumerate(firsts[:num_groups]):
        slots[group][: max(first - begin, 0)] = _NOT_WANTED
    for group, (length, page) in enumerate(
        zip(firsts[num_groups:], pages, strict=True), num_groups
    ):
        if length > 0 and page >= 0:
            slots[group][:] = _NOT_WANTED
            slots[group][length - 1 - begin] = page


def _parts_of(numbers: Sequence[int], num_groups: int, num_state_groups: int) -> list[list[int]]:
    """Return the numbers of each layer group and state group of a map of slots.

    Raises
    ------
    ValueError
        If it is no such map.
    """
    parts, at = [], 0
    for group in range(num_groups + num_state_groups):
        count = numbers[at] if at < len(numbers) else -1
        end = at + 1 + 2 * count
        if count < 0 or end > len(numbers) or (group >= num_groups and count > 1):
            raise ValueError("no map of slots")
        parts.append(list(numbers[at:end]))
        at = end
    return parts


def _without_first(part: list[int], count: int) -> list[int]:
    """Return the runs of a group, of whose first `count` positions none is wanted."""
    runs, left = [_NOT_WANTED, count], count
    for slot, length in zip(part[1::2], part[2::2], strict=True):
        gone = min(left, length)
        left -= gone
        if length > gone:
            runs += [slot + gone, length - gone]
    return [len(runs) // 2, *runs]
