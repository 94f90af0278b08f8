# SPDX-License-Identifier: Apache-2.0
"""`Receiver`: the side of a transfer that requests K and V and reads them."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cache import KVCache, page_groups
from . import _runtime
from .channel import Channel, MessageError, TransferError, TransferTimeout
from .clock import Deadline
from .endpoint import Endpoint, field, integers, quote
from .first_positions import leave_out
from .layout import expand_map, expand_runs, num_slots_of, regions


@dataclass
class Ticket:
    """A request of a `Receiver`.

    Attributes
    ----------
    seq_id : int
    begin, length : int
        The requested positions ``[begin, begin + length)``.
    read, confirmed : int
        Positions below these have been read, and confirmed by the sender.
    is_done : bool
        Whether the sequence is complete.
    result : JSON values
        The argument of `Sender.finish`.
    error : Exception, optional
        The reason for a failure.
    """

    id: int
    seq_id: int
    receive_id: int
    begin: int
    length: int
    slots: list[np.ndarray]  # per layer group, of every position; -1: none; then of states
    read: int
    confirmed: int
    unconfirmed: dict[int, int]  # block -> the position after its last
    firsts: list[int] = dataclasses.field(default_factory=list)  # positions that come, by group
    is_finished: bool = False
    is_done: bool = False
    result: Any = None
    error: Exception | None = None

    @property
    def end(self) -> int:
        return self.begin + self.length


class Receiver(Endpoint):
    """The side that needs K and V. It is a context manager that closes the connection.

    Parameters
    ----------
    cache : KVCache
    channel : Channel
    timeout : float
        Default time limit of calls, in seconds.
    model : dict of JSON values, optional
        What computes K and V. Both sides must give the same.

    Notes
    -----
    A sequence has its new length as soon as `request` returns, but must not be used before the
    transfer is done. A failed transfer leaves the sequence as it was before.
    """

    role = "receiver"

    def __init__(
        self,
        cache: KVCache,
        channel: Channel,
        timeout: float = 30.0,
        *,
        model: dict[str, Any] | None = None,
    ) -> None:
        self._tickets: dict[int, Ticket] = {}
        self._ids = itertools.count(1)
        self._their_slots: list[int] = []
        self._receives: set[int] = set()  # receives whose pages are reserved
        self._info, self._page_groups = cache.description, page_groups(cache)
        self._num_groups = len(cache.stats()["groups"])
        super().__init__(cache, channel, timeout, model)
        # For an object that is dropped without being closed.
        forget = weakref.finalize(self, _runtime.release_receives, cache, self._receives)
        forget.atexit = False  # the cache ends with the process
        self.poll()

    def request(self, seq_id: int, length: int, payload: Any = None) -> Ticket:
        """Reserve pages for more positions of a sequence and request them from the sender.

        Parameters
        ----------
        seq_id : int
            A sequence of this cache, which may be empty.
        length : int
            Number of positions to append.
        payload : JSON values, optional
            Data for the sender, for example the tokens.

        Returns
        -------
        Ticket

        Raises
        ------
        KeyError, ValueError, CacheFullError
            If there is no such sequence, it cannot be extended, or too few pages are available.
            Nothing has changed.
        TransferError
            If the connection has failed.
        """
        if self.error is not None:
            raise self.error
        begin = self.cache.sequence_length(seq_id)
        numbers = _runtime.prepare_recv(self.cache, seq_id, length)
        number = next(self._ids)
        try:
            receive = _runtime.receive_id(self.cache, seq_id)
            self._receives.add(receive)
            num_state_groups = len(num_slots_of(self.cache)) - self._num_groups
            slots = expand_map(numbers, self._num_groups, num_state_groups, begin)
            ticket = self._tickets[number] = Ticket(
                number, seq_id, receive, begin, length, slots, begin, begin, unconfirmed={}
            )
            message = {"type": "request", "id": number, "begin": begin, "length": length}
            self._say(message | {"payload": payload, "slots": numbers})
        except BaseException as error:  # an interrupt as well, when the sender may know of it
            self._give_up(seq_id, number, error)
            raise
        return ticket

    def _give_up(self, seq_id: int, number: int, error: BaseException) -> None:
        """Restore a sequence whose request has failed half way."""
        self._tickets.pop(number, None)
        receive = _runtime.receive_id(self.cache, seq_id)
        if receive:  # `_say` has not given it up
            _runtime.cancel_receive(self.cache, seq_id, receive)
            self._receives.discard(receive)
        if self.error is None:
            self._tell_failure(number, f"{type(error).__name__}: {error}")

    def wait(self, ticket: Ticket, timeout: float | None = None) -> Any:
        """Wait until all rows of a request have arrived.

        Returns
        -------
        JSON values
            The argument of the sender's `finish`.

        Raises
        ------
        TransferTimeout, TransferError
            If the transfer fails. The sequence is as it was before `request`, and the sender's
            calls fail as well.
        """
        deadline = Deadline(self.timeout if timeout is None else timeout)
        while not ticket.is_done:
            if ticket.error is not None:
                raise ticket.error
            if not self._poll_for(ticket, deadline.left()) and not deadline.left():
                error = TransferTimeout(
                    f"sequence {ticket.seq_id} waits for positions [{ticket.confirmed}, "
                    f"{ticket.end}), and the sender does not send them"
                )
                self._fail_ticket(ticket, error)
                raise error
        return ticket.result

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request. The sequence is then as it was before `request`."""
        if not ticket.is_done and ticket.error is None:
            self._fail_ticket(ticket, TransferError(f"request {ticket.id} was cancelled"))

    # --- inside ---------------------------------------------------------------------------------

    def _greet(self, hello: dict[str, Any]) -> None:
        self._their_slots = integers(hello, "num_slots")
        num_pools = len(num_slots_of(self.cache))
        if len(self._their_slots) != num_pools:
            raise TransferError(
                f"the sender has {len(self._their_slots)} groups of layers, this cache {num_pools}"
            )
        self.channel.attach(self.cache, field(hello, "memory", dict))

    def _handle(self, message: dict[str, Any]) -> None:
        kind, ticket = message.get("type"), self._tickets.get(field(message, "id", int))
        if kind not in ("offer", "confirmed", "finished", "failed"):
            raise MessageError(f"the sender sent a message of type {quote(kind)}")
        if ticket is None:
            return  # the transfer has failed here, and the sender has been told
        if kind == "failed":
            reason = TransferError(f"the sender gave up: {field(message, 'reason', str)}")
            return self._drop(ticket, reason)
        try:
            if kind == "offer":
                self._read(ticket, message)
            elif kind == "confirmed":
                self._confirm(ticket, field(message, "block", int))
            else:
                ticket.is_finished, ticket.result = True, message.get("result")
            self._finish_if_complete(ticket)
        except TransferError as error:
            self._fail_ticket(ticket, error)
        except Exception as error:  # from a channel, or a cache that was used in the meantime
            self._fail_ticket(ticket, TransferError(f"{type(error).__name__}: {error}"))

    def _read(self, ticket: Ticket, offer: dict[str, Any]) -> None:
        block = field(offer, "block", int)
        if _runtime.receive_id(self.cache, ticket.seq_id) != ticket.receive_id:
            raise TransferError(f"sequence {ticket.seq_id} was used while it was being received")
        if "firsts" in offer:
            self._leave_out(ticket, offer)
        runs = self._check_offer(ticket, offer)
        by_pool, by_group = {}, {}
        for index, layer in enumerate(self._page_groups):
            pool = layer["pool"]
            if pool not in by_pool:
                by_pool[pool] = regions(layer, self._page_size(pool), runs[pool])
            by_group[index] = by_pool[pool]
        self.channel.read(by_group, f"{ticket.id}.{block}", self.timeout)
        ticket.read = offer["end"]
        ticket.unconfirmed[block] = offer["end"]
        self.channel.send({"type": "read", "id": ticket.id, "block": block})

    def _leave_out(self, ticket: Ticket, offer: dict[str, Any]) -> None:
        """Take only what the sender has of the first positions."""
        if ticket.read != ticket.begin or ticket.firsts:
            raise TransferError("the sender leaves out positions after it has sent some")
        firsts = integers(offer, "firsts")
        receive = ticket.receive_id
        pages = _runtime.shorten_receive(self.cache, ticket.seq_id, receive, firsts)
        leave_out(ticket.slots, ticket.begin, firsts, pages)
        ticket.firsts = firsts

    def _page_size(self, pool: int) -> int:
        """Return the slots of a page; a page of states is one."""
        return self._info["page_size"] if pool < self._num_groups else 1

    def _confirm(self, ticket: Ticket, block: int) -> None:
        if block not in ticket.unconfirmed:
            raise TransferError(f"the sender confirms block {block}, which was not read")
        ticket.confirmed = max(ticket.confirmed, ticket.unconfirmed.pop(block))

    def _check_offer(self, ticket: Ticket, offer: dict[str, Any]) -> list[np.ndarray]:
        """Check an offer and return its runs, which must match the requested slots exactly."""
        begin, end = field(offer, "begin", int), field(offer, "end", int)
        if begin != ticket.read or not begin < end <= ticket.end:
            raise TransferError(
                f"the sender offers positions [{begin}, {end}), expected some from {ticket.read} "
                f"up to {ticket.end}"
            )
        groups = field(offer, "runs", list)
        if len(groups) != len(ticket.slots):
            raise TransferError(f"the sender offers {len(groups)} groups of {len(ticket.slots)}")
        checked = []
        for group, numbers in enumerate(groups):
            page_size = self._page_size(group)
            try:
                runs = np.array(numbers, np.int64).reshape(-1, 3)
            except (ValueError, TypeError, OverflowError):
                raise TransferError(f"the sender offers no runs of group {group}") from None
            source, destination, length = runs.T
            wanted = ticket.slots[group][begin - ticket.begin : end - ticket.begin]
            wanted = wanted[wanted >= 0]
            if group >= self._num_groups and ticket.firsts and len(runs) == len(wanted):
                destination[:] = wanted  # the sender does not know the page of such a state
            fits = (
                np.all((length > 0) & (length <= page_size))
                and length.sum() == len(wanted)
                and np.all((source >= 0) & (source <= self._their_slots[group] - length))
                and np.all(source % page_size + length <= page_size)
                and np.all(destination % page_size + length <= page_size)
                and np.array_equal(expand_runs(destination, length), wanted)
            )
            if not fits:
                raise TransferError(
                    f"the sender offers positions [{begin}, {end}) of group {group} for other "
                    "slots than these positions have"
                )
            checked.append(runs)
        return checked

    def _finish_if_complete(self, ticket: Ticket) -> None:
        if not ticket.is_finished or ticket.unconfirmed:
            return
        if ticket.confirmed != ticket.end:
            raise TransferError(
                f"the sender has finished, but positions [{ticket.confirmed}, {ticket.end}) of "
                f"sequence {ticket.seq_id} are missing"
            )
        _runtime.finish_receive(self.cache, ticket.seq_id, ticket.receive_id)
        self._receives.discard(ticket.receive_id)
        ticket.is_done = True
        del self._tickets[ticket.id]
        self.channel.send({"type": "done", "id": ticket.id})

    def _fail_ticket(self, ticket: Ticket, error: Exception) -> None:
        self._drop(ticket, error)
        self._tell_failure(ticket.id, str(error))

    def _tell_failure(self, number: int, reason: str) -> None:
        try:
            self.channel.send({"type": "failed", "id": number, "reason": reason})
        except TransferError:
            pass  # the peer is gone

    def _drop(self, ticket: Ticket, error: Exception) -> None:
        ticket.error = error
        self._tickets.pop(ticket.id, None)
        try:
            _runtime.cancel_receive(self.cache, ticket.seq_id, ticket.receive_id)
            self._receives.discard(ticket.receive_id)
        except (KeyError, ValueError):
            pass  # the sequence was removed, or used in the meantime

    def _abandon(self, error: Exception) -> None:
        for ticket in list(self._tickets.values()):
            self._drop(ticket, error)
