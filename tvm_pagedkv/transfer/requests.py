# SPDX-License-Identifier: Apache-2.0
"""`Request`: what a receiver asks a sender for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .channel import MessageError
from .endpoint import field, integers, quote


@dataclass(frozen=True)
class Request:
    """What a receiver wants: `length` positions of a sequence from `begin` on.

    `payload` is what the receiver has said about it, the tokens for example.
    """

    id: int
    begin: int
    length: int
    payload: Any
    slots: tuple[int, ...]


def request_of(message: dict[str, Any]) -> Request:
    """The request of a message.

    The cache checks the slots when the request is answered; here it is only made sure that they are
    those of as many positions as the receiver names.

    Raises
    ------
    MessageError
        If it makes no sense.
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
    slots = request.slots  # of each group: number of runs, then (slot, length) of each
    if not slots or sum(slots[2 : 1 + 2 * slots[0] : 2]) != request.length:
        raise MessageError(
            f"the receiver asks for {request.length} positions, and has slots for others"
        )
    return request
