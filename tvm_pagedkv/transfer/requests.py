# SPDX-License-Identifier: Apache-2.0
"""`Request`: a receiver's request, as the sender sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .channel import MessageError
from .endpoint import field, integers, quote


@dataclass(frozen=True)
class Request:
    """A receiver's request for positions of a sequence.

    Attributes
    ----------
    id : int
        Number of the request in its connection.
    begin, length : int
        The positions ``[begin, begin + length)``.
    payload : JSON values
        The argument of `Receiver.request`, for example the tokens.
    slots : tuple of int
        Map of the receiver's slots, for the runtime.
    """

    id: int
    begin: int
    length: int
    payload: Any
    slots: tuple[int, ...]


def request_of(message: dict[str, Any]) -> Request:
    """Return the request in a message.

    The cache checks the slots when the request is answered. This function only checks that their
    number equals the number of positions.

    Raises
    ------
    MessageError
        If the message is invalid.
    """
    request = Request(
        field(message, "id", int),
        field(message, "begin", int),
        field(message, "length", int),
        message.get("payload"),
        tuple(integers(message, "slots")),
    )
    if request.begin < 0 or request.length < 1 or request.begin + request.length >= 2**31:
        raise MessageError(
            f"the receiver asks for {quote(request.length)} positions from "
            f"{quote(request.begin)} on"
        )
    slots = request.slots  # per group: number of runs, then (slot, length) per run
    num_slots = sum(slots[2 : 1 + 2 * slots[0] : 2]) if slots else 0
    if num_slots != request.length:
        raise MessageError(
            f"the request covers {request.length} positions but has {num_slots} slots"
        )
    return request
