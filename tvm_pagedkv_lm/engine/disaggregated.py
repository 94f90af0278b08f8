# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill for `generate`: one process computes prompts, another continues them."""

from __future__ import annotations

import base64
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tvm_pagedkv import CacheFullError
from tvm_pagedkv.cache import KVCache
from tvm_pagedkv.transfer import (
    Channel,
    ChannelClosed,
    Receiver,
    Request,
    Sender,
    TransferError,
    TransferTimeout,
)

from ..model.model import DecoderModel

_log = logging.getLogger("tvm_pagedkv_lm.engine")


class RemotePrefill:
    """The decoding end: requests prompts from a `serve_prefill` at the other end.

    A context manager that closes the channel.

    Parameters
    ----------
    model : DecoderModel
        The model that continues the prompts.
    cache : KVCache
    channel : Channel
    timeout : float
        Time limit of a prompt, in seconds.

    Raises
    ------
    ValueError
        If the models of the two ends differ, or the layouts of their caches.
    TransferError
        If the other end does not answer.
    """

    def __init__(
        self, model: DecoderModel, cache: KVCache, channel: Channel, timeout: float = 120.0
    ) -> None:
        self._vocab_size = model.config.vocab_size
        self._receiver = Receiver(cache, channel, timeout, model=_described(model))
        self._receiver.connect()

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[np.ndarray]:
        """Append prompts to sequences.

        Parameters
        ----------
        prompts : sequence of (seq_id, tokens)
            Empty sequences of the cache, and the tokens of each.

        Returns
        -------
        list of float32 ``[vocab_size]``
            The logits after the last token of each prompt.

        Raises
        ------
        TransferError
            If a transfer fails. All sequences are as they were before.
        CacheFullError
            If too few pages are available.
        """
        tickets = []
        try:
            for seq_id, tokens in prompts:
                payload = {"tokens": [int(token) for token in tokens]}
                tickets.append(self._receiver.request(seq_id, len(tokens), payload))
            results = [self._receiver.wait(ticket) for ticket in tickets]
            return [_decode_logits(result, self._vocab_size) for result in results]
        except BaseException:  # an interrupt as well
            for ticket, (seq_id, tokens) in zip(tickets, prompts, strict=False):
                if ticket.is_done:
                    self._receiver.cache.pop_n(seq_id, len(tokens))
                else:
                    self._receiver.cancel(ticket)
            raise

    def close(self) -> None:
        """Close the channel. Repeated calls do nothing."""
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
    """Compute prompts for a `RemotePrefill` until it closes the channel.

    Each chunk is sent while the next one is computed. There is no time limit between requests. An
    invalid request is answered with an error.

    Parameters
    ----------
    model : DecoderModel
    channel : Channel
    max_total_tokens, prefill_chunk_size : int
        Capacities of this end's cache. A longer prompt is refused.
    timeout : float
        Time limit of the other end's hello, and of its answers during a transfer, in seconds.

    Returns
    -------
    int
        Number of prompts that were computed.

    Raises
    ------
    TransferError
        If the other end does not say hello in time, or sends invalid messages.
    ValueError
        If the models of the two ends differ, or the layouts of their caches.
    """
    cache = model.create_cache(4, max_total_tokens, prefill_chunk_size, enable_kv_transfer=True)
    num_served = 0
    try:
        with Sender(cache, channel, timeout=timeout, model=_described(model)) as sender:
            sender.connect()
            for seq_id in itertools.count():
                request = _next_request(sender)
                num_served += _answer(model, sender, request, seq_id, prefill_chunk_size)
    except ChannelClosed:
        pass
    return num_served


def _described(model: DecoderModel) -> dict[str, Any]:
    """Return what must be the same at both ends, besides the layout of the caches."""
    # The budget of decode steps does not change K and V of prompts.
    options = replace(model.options, budgets=())
    return {
        "vocab_size": model.config.vocab_size,
        "content_digest": model.content_digest,
        "precision": options.precision,
    }


def _next_request(sender: Sender) -> Request:
    """Wait for the next request without a time limit."""
    while True:
        try:
            return sender.next_request()
        except TransferTimeout:
            if sender.error is not None:
                raise


def _answer(model: DecoderModel, sender: Sender, request: Request, seq_id: int, chunk: int) -> bool:
    """Answer one request; return whether its prompt was computed. Raise only if disconnected."""
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


def _decode_logits(text: Any, vocab_size: int) -> np.ndarray:
    try:
        logits = np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    except (TypeError, ValueError):
        raise TransferError("the other end did not send logits") from None
    if len(logits) != vocab_size:
        raise TransferError(f"the other end sent {len(logits)} logits, expected {vocab_size}")
    return logits
