# SPDX-License-Identifier: Apache-2.0
"""Prompts computed in one process, continued in another: both ends for `generation.generate`."""

from __future__ import annotations

import base64
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._errors import CacheFullError
from ..cache import KVCache
from ..models import DecoderModel
from ..transfer import (
    Channel,
    ChannelClosed,
    Receiver,
    Request,
    Sender,
    TransferError,
    TransferTimeout,
)

_log = logging.getLogger("tvm_pagedkv.disaggregated")


class RemotePrefill:
    """The end that continues: asks the other end, a `serve_prefill`, for prompts.

    Parameters
    ----------
    cache : KVCache
    channel : Channel
    timeout : float
        Seconds that a prompt may take.
    """

    def __init__(self, cache: KVCache, channel: Channel, timeout: float = 120.0) -> None:
        self._receiver = Receiver(cache, channel, timeout)
        self._receiver.connect()

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[np.ndarray]:
        """Fill sequences, each empty, with the prompts ``(seq_id, tokens)``.

        Returns
        -------
        float32 ``[vocab_size]`` each: logits after the prompt's last token

        Raises
        ------
        TransferError
            The sequences are as they were before.
        """
        tickets = []
        try:
            for seq_id, tokens in prompts:
                payload = {"tokens": [int(token) for token in tokens]}
                tickets.append(self._receiver.request(seq_id, len(tokens), payload))
            return [_decode_logits(self._receiver.wait(ticket)) for ticket in tickets]
        except Exception:
            for ticket, (seq_id, tokens) in zip(tickets, prompts, strict=False):
                if ticket.is_done:
                    self._receiver.cache.pop_n(seq_id, len(tokens))
                else:
                    self._receiver.cancel(ticket)
            raise

    def close(self) -> None:
        """Let the other end go. May be called again."""
        self._receiver.close()

    def __enter__(self) -> RemotePrefill:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def serve_prefill(
    model: DecoderModel,
    channel: Channel,
    *,
    max_total_tokens: int = 8192,
    prefill_chunk_size: int = 512,
    timeout: float = 120.0,
) -> int:
    """Compute prompts for the other end until it closes the channel.

    Each chunk is sent as soon as it is computed, while the next one is. The other end may take as
    long as it likes between its requests; a request that makes no sense is answered with an error.

    Parameters
    ----------
    max_total_tokens, prefill_chunk_size : int
        Of the cache of this end; a longer prompt is refused.
    timeout : float
        Seconds to wait for the other end's hello, and for its answers while it receives a prompt.

    Returns
    -------
    int
        Prompts that were computed.

    Raises
    ------
    TransferError
        If the other end does not say hello in time, or sends what cannot be read.
    ValueError
        If its cache does not fit.
    """
    cache = model.create_cache(4, max_total_tokens, prefill_chunk_size, enable_kv_transfer=True)
    num_served = 0
    try:
        with Sender(cache, channel, timeout=timeout) as sender:
            sender.connect()
            for seq_id in itertools.count():
                request = _next_request(sender)
                num_served += _answer(model, sender, request, seq_id, prefill_chunk_size)
    except ChannelClosed:
        pass
    return num_served


def _next_request(sender: Sender) -> Request:
    """The next request, however long the other end takes."""
    while True:
        try:
            return sender.next_request()
        except TransferTimeout:
            if sender.error is not None:
                raise


def _answer(model: DecoderModel, sender: Sender, request: Request, seq_id: int, chunk: int) -> bool:
    """Compute one prompt, or say why not; only the end of the connection is an error."""
    try:
        _serve(model, sender, request, seq_id, chunk)
        return True
    except TransferError:
        if sender.error is not None:
            raise
        return False  # the other end knows; it may ask for something else
    except (ValueError, CacheFullError) as error:
        sender.refuse(request, str(error))
        return False
    except Exception as error:
        _log.exception("request %s failed", request.id)
        sender.refuse(request, f"{type(error).__name__}: {error}")
        return False
    finally:
        if seq_id in sender.cache.sequence_ids():
            sender.cache.remove_sequence(seq_id)


def _serve(model: DecoderModel, sender: Sender, request: Request, seq_id: int, chunk: int) -> None:
    tokens = _check_tokens(model, request)
    sender.cache.add_sequence(seq_id)
    send = sender.send(request, seq_id)
    logits = np.zeros((1, 0), np.float32)  # a request has a token at least
    for begin in range(0, len(tokens), chunk):
        logits = model.prefill(sender.cache, [seq_id], [tokens[begin : begin + chunk]])
        sender.poll()
    sender.finish(send, _encode_logits(logits[0]))
    sender.wait(send)


def _check_tokens(model: DecoderModel, request: Request) -> list[int]:
    payload = request.payload
    tokens = payload.get("tokens") if isinstance(payload, dict) else None
    if not isinstance(tokens, list) or len(tokens) != request.length or request.begin != 0:
        raise ValueError(f"expected {request.length} tokens of a prompt from its beginning on")
    for token in tokens:
        if not (type(token) is int and 0 <= token < model.config.vocab_size):
            raise ValueError(f"{repr(token):.200} is not in [0, {model.config.vocab_size})")
    return tokens


def _encode_logits(logits: np.ndarray) -> str:
    return base64.b64encode(logits.astype("<f4").tobytes()).decode()


def _decode_logits(text: Any) -> np.ndarray:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    except (TypeError, ValueError):
        raise TransferError("the other end sent no logits") from None
