# SPDX-License-Identifier: Apache-2.0
"""`Sender`: the side of a transfer that computes K and V and offers them."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ..cache import KVCache
from . import _runtime, clock
from .channel import Channel, MessageError, TransferError, TransferTimeout
from .clock import Deadline
from .endpoint import Endpoint, integers, quote
from .endpoint import field as of
from .first_positions import without_missing
from .requests import Request, request_of

_MAX_REQUESTS = 1024  # maximum number of requests that wait for `next_request`
_POLL_SECONDS = 20e-6


@dataclass
class Send:
    """The answer to a request.

    Attributes
    ----------
    request : Request
    seq_id : int
        The sequence that is sent.
    handed_over : int
        Positions below this have been offered to the receiver.
    is_finished : bool
        Whether `Sender.finish` was called.
    is_done : bool
        Whether the receiver has all rows.
    error : Exception, optional
        The reason for a failure.
    """

    request: Request
    seq_id: int
    handed_over: int
    id: int = 0
    is_finished: bool = False
    is_done: bool = False
    error: Exception | None = None
    blocks: set[int] = field(default_factory=set)  # blocks that the receiver has not read yet
    firsts: list[int] = field(default_factory=list)  # positions, where it lacks earlier ones


@dataclass(frozen=True)
class _Claim:
    """A receiver's report that it has read a block, which the channel has not confirmed yet."""

    send: Send
    deadline: Deadline


class Sender(Endpoint):
    """The side that computes K and V. It is a context manager that closes the connection.

    Parameters
    ----------
    cache : KVCache
    channel : Channel
    peer : int
        Number of the receiver, as ``kv_cache_disagg_mark_send`` takes it: any integer. Engines pass
        the group offset of the destination (`recver_pe_offset`). A cache can have several senders
        with different numbers.
    timeout : float
        Default time limit of calls, in seconds.
    model : dict of JSON values, optional
        What computes K and V. Both sides must give the same.

    Notes
    -----
    Nothing is copied during a step. When the step ends, the receiver is told the slots of the new
    rows, and their pages are pinned until it has read them, even if the sequence is removed. Only
    calls of this object handle the receiver's messages, so call `poll` regularly.
    """

    role = "sender"

    def __init__(
        self,
        cache: KVCache,
        channel: Channel,
        peer: int = 0,
        timeout: float = 30.0,
        *,
        model: dict[str, Any] | None = None,
    ) -> None:
        self.peer = peer
        self._requests: deque[Request] = deque()
        self._unproved: dict[int, _Claim] = {}  # by block
        self._sends: dict[int, Send] = {}
        super().__init__(cache, channel, timeout, model)
        self.poll()

    def poll(self, timeout: float = 0.0) -> bool:
        deadline = Deadline(timeout)
        while self._unproved:  # `receive` does not return when the channel learns of a read
            if super().poll(0.0) | self._check_claims():
                return True
            if not deadline.left():
                return False
            clock.sleep(_POLL_SECONDS)
        return super().poll(deadline.left())

    def next_request(self, timeout: float | None = None) -> Request:
        """Return the next request of the receiver.

        Raises
        ------
        TransferTimeout
            If none comes in time.
        """
        deadline = Deadline(self.timeout if timeout is None else timeout)
        while not self._requests:
            if not self.poll(deadline.left()) and not self._requests and not deadline.left():
                raise TransferTimeout("no request came from the receiver")
        return self._requests.popleft()

    def send(self, request: Request, seq_id: int) -> Send:
        """Answer a request with a sequence: with its current rows, and with those of later steps.

        Positions beyond the request are not sent.

        Parameters
        ----------
        request : Request
        seq_id : int
            A sequence of this cache.

        Returns
        -------
        Send

        Raises
        ------
        KeyError, ValueError
            If there is no such sequence, or it cannot be sent. The receiver's call fails as well.
        """
        if request.id in self._sends:
            raise ValueError(f"request {request.id} is being answered already")
        send = self._sends[request.id] = Send(request, seq_id, request.begin)
        try:
            slots, send.firsts = without_missing(self.cache, seq_id, request)
            _runtime.mark_send(self.cache, seq_id, request.begin, slots, self.peer)
            send.id = _runtime.send_id(self.cache, seq_id)
        except Exception as error:
            self._fail_send(send, error)
            raise
        except BaseException:
            self._fail_send(send, TransferError("interrupted"))
            raise
        return send

    def refuse(self, request: Request, reason: str) -> None:
        """Reject a request, or stop answering it. The receiver's call fails.

        Parameters
        ----------
        request : Request
        reason : str
            Text for the receiver's error.
        """
        send = self._sends.get(request.id)
        if send is not None:
            self._drop(send, TransferError(f"request {request.id} was refused: {reason}"))
        self._say({"type": "failed", "id": request.id, "reason": reason})

    def finish(self, send: Send, result: Any = None) -> None:
        """Declare that all rows of a request have been computed.

        Parameters
        ----------
        send : Send
        result : JSON values, optional
            The result of the receiver's `wait`.

        Raises
        ------
        ValueError
            If positions are missing; the receiver's call fails as well.
        TransferError
            If the transfer has failed.
        """
        self.poll()
        self._check(send)
        end = send.request.begin + send.request.length
        if send.handed_over < end:
            error = ValueError(
                f"request {send.request.id} is for positions [{send.request.begin}, {end}), but "
                f"sequence {send.seq_id} has had those below {send.handed_over} only"
            )
            self._fail_send(send, error)
            raise error
        self._say({"type": "finished", "id": send.request.id, "result": result})
        send.is_finished = True

    def wait(self, send: Send, timeout: float | None = None) -> None:
        """Wait until the receiver has all rows; call `finish` first.

        Raises
        ------
        ValueError
            If `finish` was not called.
        TransferTimeout, TransferError
            If the transfer fails. The pages are unpinned, and the receiver's call fails as well.
        """
        if not send.is_finished:
            raise ValueError(f"request {send.request.id} is not finished; call finish first")
        deadline = Deadline(self.timeout if timeout is None else timeout)
        while not send.is_done:
            self._check(send)
            if not self._poll_for(send, deadline.left()) and not deadline.left():
                error = TransferTimeout(f"the receiver of request {send.request.id} did not finish")
                self._fail_send(send, error)
                raise error

    # --- inside ---------------------------------------------------------------------------------

    def _memory(self) -> dict[str, Any]:
        return self.channel.expose(self.cache)

    def _greet(self, hello: dict[str, Any]) -> None:
        # The cache refers to the handler, so the handler must not refer to the cache.
        this = weakref.ref(self)

        def handler(block: int) -> None:
            sender = this()
            if sender is not None:
                sender._offer(block)

        _runtime.set_send_handler(self.cache, self.peer, handler, integers(hello, "num_slots"))
        # For an object that is dropped without being closed.
        self._forget = weakref.finalize(self, _runtime.forget_receiver, self.cache, self.peer)
        self._forget.atexit = False  # the cache ends with the process

    def _offer(self, block: int) -> None:
        """Offer a block. Called at the end of a step, which an error here must not fail."""
        try:
            self._offer_block(block)
        except Exception as error:
            self._fail(TransferError(f"cannot offer block {block}: {error}"))

    def _offer_block(self, block: int) -> None:
        described = _runtime.send_block(self.cache, block)
        open_sends = (s for s in self._sends.values() if s.seq_id == described["sequence_id"])
        send = next((s for s in open_sends if s.id in (0, described["send_id"])), None)
        if send is None:
            _runtime.release_send_block(self.cache, block)
            return
        send.id = described["send_id"]
        send.blocks.add(block)
        send.handed_over = described["end"]
        offer = {"type": "offer", "id": send.request.id, "block": block}
        offer |= {"begin": described["begin"], "end": described["end"]}
        if send.firsts and described["begin"] == send.request.begin:
            offer["firsts"] = send.firsts
        try:
            self.channel.send(
                offer | {"runs": [runs.ravel().tolist() for runs in described["runs"]]}
            )
        except TransferError as error:
            self._fail_send(send, error)

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if kind == "request":
            return self._take_request(request_of(message))
        request_id = of(message, "id", int)
        send = self._sends.get(request_id)
        if kind == "failed":
            self._requests = deque(r for r in self._requests if r.id != request_id)
            if send is not None:
                reason = of(message, "reason", str)
                self._drop(send, TransferError(f"the receiver gave up: {reason}"))
        elif kind == "read":
            self._confirm(send, of(message, "block", int), request_id)
        elif kind == "done":
            if send is not None:
                send.is_done = True
                self._drop(send, None)
        else:
            raise MessageError(f"the receiver sent a message of type {quote(kind)}")

    def _take_request(self, request: Request) -> None:
        if request.id in self._sends or any(r.id == request.id for r in self._requests):
            raise MessageError(f"the receiver has made request {quote(request.id)} already")
        if len(self._requests) >= _MAX_REQUESTS:
            raise MessageError(f"{_MAX_REQUESTS} requests of the receiver wait already")
        self._requests.append(request)

    def _reject(self, message: Any, error: MessageError) -> None:
        """Tell the receiver what is wrong with its message; it may send others."""
        if not self.is_connected:
            super()._reject(message, error)
        request_id = message.get("id") if isinstance(message, dict) else None
        if type(request_id) is not int:
            request_id = None
        elif request_id in self._sends:
            self._drop(self._sends[request_id], error)
        self._say({"type": "failed", "id": request_id, "reason": str(error)})

    def _confirm(self, send: Send | None, block: int, request_id: int) -> None:
        """Handle the receiver's report that it has read a block."""
        if send is None or block not in send.blocks:
            error = TransferError(f"block {block} was let go before it was read")
            if send is None:
                return self._tell_failure(request_id, error)
            return self._fail_send(send, error)
        # Half the timeout, so that `wait` fails with this reason and not with a timeout.
        self._unproved.setdefault(block, _Claim(send, Deadline(self.timeout / 2)))
        self._check_claims()

    def _check_claims(self) -> bool:
        """Confirm blocks that the channel knows to be read; return whether any was decided.

        This does not wait, because one thread may serve several receivers.
        """
        num_decided = 0
        for block, claim in list(self._unproved.items()):
            send = claim.send
            if block in send.blocks:  # otherwise the transfer has failed since
                if self.channel.was_read(f"{send.request.id}.{block}", 0.0):
                    send.blocks.remove(block)
                    _runtime.release_send_block(self.cache, block)
                    self._say({"type": "confirmed", "id": send.request.id, "block": block})
                elif claim.deadline.left():
                    continue
                else:
                    error = TransferError(
                        f"no read notification for block {block} within {self.timeout / 2:g} s"
                    )
                    self._fail_send(send, error)
            self._unproved.pop(block, None)
            num_decided += 1
        return num_decided > 0

    def _check(self, send: Send) -> None:
        if send.error is None and self.error is not None:
            raise self.error
        if send.error is None and not self._is_alive(send):
            self._fail_send(
                send,
                TransferError(
                    f"sequence {send.seq_id} was removed, or popped behind position "
                    f"{send.handed_over}, before all of request {send.request.id} was computed"
                ),
            )
        if send.error is not None:
            raise send.error

    def _is_alive(self, send: Send) -> bool:
        if send.is_done or send.handed_over == send.request.begin + send.request.length:
            return True
        try:
            return _runtime.send_id(self.cache, send.seq_id) == send.id
        except KeyError:
            return False

    def _fail_send(self, send: Send, error: Exception) -> None:
        self._drop(send, error)
        self._tell_failure(send.request.id, error)

    def _tell_failure(self, request_id: int, error: Exception) -> None:
        try:
            self.channel.send({"type": "failed", "id": request_id, "reason": str(error)})
        except TransferError:
            pass  # the peer is gone

    def _drop(self, send: Send, error: Exception | None) -> None:
        """Release what a transfer holds."""
        send.error = error
        self._sends.pop(send.request.id, None)
        try:
            if send.id:
                _runtime.cancel_send(self.cache, send.seq_id, send.id)
        except KeyError:
            pass  # the sequence was removed, and its mark with it
        for block in send.blocks:
            _runtime.release_send_block(self.cache, block)
        send.blocks.clear()

    def _abandon(self, error: Exception) -> None:
        for send in list(self._sends.values()):
            self._drop(send, error)
        self._requests.clear()
        self._unproved.clear()
        if self.is_connected:
            self._forget()
