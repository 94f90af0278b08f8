# SPDX-License-Identifier: Apache-2.0
"""Prompts computed in one process, continued in another: both ends for `generation.generate`."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .cache import KVCache
from .models import LlamaModel
from .transfer import Channel, ChannelClosed, Receiver, Request, Sender, TransferError


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
        """Let the other end go."""
        self._receiver.close()


def serve_prefill(
    model: LlamaModel,
    channel: Channel,
    *,
    max_total_tokens: int = 8192,
    prefill_chunk_size: int = 512,
    timeout: float = 120.0,
) -> int:
    """Compute prompts for the other end until it closes the channel.

    Each chunk is sent as soon as it is computed, while the next one is.

    Parameters
    ----------
    max_total_tokens, prefill_chunk_size : int
        Of the cache of this end; a longer prompt is refused.
    timeout : float
        Seconds to wait for the first request, for the next one and for the other end's answers.

    Returns
    -------
    int
        Prompts that were computed.
    """
    cache = model.create_cache(4, max_total_tokens, prefill_chunk_size, enable_kv_transfer=True)
    num_served = 0
    with Sender(cache, channel, timeout=timeout) as sender:
        sender.connect()
        for seq_id in itertools.count():
            try:
                request = sender.next_request()
            except ChannelClosed:
                return num_served
            try:
                _serve(model, sender, request, seq_id, prefill_chunk_size)
                num_served += 1
            except ChannelClosed:
                return num_served
            except TransferError:
                pass  # the other end knows; it may ask for something else
            except (ValueError, RuntimeError) as error:  # a CacheFullError is one
                sender.refuse(request, str(error))
            finally:
                if seq_id in cache.sequence_ids():
                    cache.remove_sequence(seq_id)
    return num_served


def _serve(model: LlamaModel, sender: Sender, request: Request, seq_id: int, chunk: int) -> None:
    tokens = _check_tokens(model, request)
    sender.cache.add_sequence(seq_id)
    send = sender.send(request, seq_id)
    logits = None
    for begin in range(0, len(tokens), chunk):
        logits = model.prefill(sender.cache, [seq_id], [tokens[begin : begin + chunk]])
        sender.poll()
    sender.finish(send, _encode_logits(logits[0]))
    sender.wait(send)


def _check_tokens(model: LlamaModel, request: Request) -> list[int]:
    payload = request.payload
    tokens = payload.get("tokens") if isinstance(payload, dict) else None
    if not isinstance(tokens, list) or len(tokens) != request.length or request.begin != 0:
        raise ValueError(f"expected {request.length} tokens of a prompt from its beginning on")
    for token in tokens:
        if not (isinstance(token, int) and 0 <= token < model.config.vocab_size):
            raise ValueError(f"{token!r} is not in [0, {model.config.vocab_size})")
    return tokens


def _encode_logits(logits: np.ndarray) -> str:
    return base64.b64encode(logits.astype("<f4").tobytes()).decode()


def _decode_logits(text: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")
