# SPDX-License-Identifier: Apache-2.0
"""`Conversation`: turns with a model, over one cache that keeps what was computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace

from tvm_pagedkv.config import PrefixCacheConfig

from ..model.model import DecoderModel
from ..text.chat_prompt import encode_chat
from ..text.plain_messages import plain_tokenizer
from ..text.tokens import encode_text
from .answer_parts import AnswerParts
from .engine import Run
from .events import FinishedEvent, Statistics, TextEvent
from .parameters import SamplingParams, check_text
from .settings import Settings

DEFAULT_MAX_TOTAL_TOKENS = 4096


class ContextFullError(ValueError):
    """The conversation with the new message has no room for an answer."""


@dataclass
class Turn:
    """Statistics of the last answer.

    Attributes
    ----------
    first_token_seconds : float
        Time until the first token, the prompt included.
    finish_reason : {"stop", "length", "context", "interrupted"}
        Why the answer ended: "length" is the limit of an answer, "context" that of the
        conversation, and "interrupted" means that the caller or an error stopped it.
    statistics : Statistics
    thought : str
        What the model wrote before the answer, where it tells both apart, as GPT-OSS does.
    """

    first_token_seconds: float = 0.0
    finish_reason: str = "interrupted"
    statistics: Statistics = field(default_factory=Statistics)
    thought: str = ""


class Conversation:
    """Messages and answers. Each answer finds the pages of the turns before it.

    With a chat template, a turn is a message and its answer. A model without one continues texts:
    each message is appended to the text so far, on a line of its own.

    Parameters
    ----------
    model : DecoderModel
    params : SamplingParams, optional
        For each answer; None: those that the makers of the model recommend. `n` must be 1. The seed
        of turn i is ``seed + i``.
    system : str, optional
        The system message, for models with a chat template.
    max_total_tokens : int, optional
        Length of the conversation in tokens; None: the model's context, and at most 4096.
    prefill_chunk_size : int
        Maximum number of rows of a prefill step.
    num_speculative_tokens : int
        As for `generate`.
    prefix_cache : bool or PrefixCacheConfig
        Whether answers reuse the turns before them. With a configuration, texts of earlier
        conversations are found, too: in the tiers that it names. Call `close` at the end.
    plain_messages : bool
        Whether control tokens in messages are text, as for `encode_chat`.

    Attributes
    ----------
    messages : list of dict
        "role" and "content" of every message, without the system message; of answers with a
        thought also "thinking".
    tokens : list of int
        The tokens of the text so far, as the model has read and written them.
    last_turn : Turn

    Raises
    ------
    ValueError
        If arguments do not go together.
    """

    def __init__(
        self,
        model: DecoderModel,
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        max_total_tokens: int | None = None,
        prefill_chunk_size: int = 512,
        num_speculative_tokens: int = 0,
        prefix_cache: bool | PrefixCacheConfig = True,
        plain_messages: bool = False,
    ) -> None:
        self.model, self.params = model, params or SamplingParams.for_model(model)
        context = model.config.context_length
        self.capacity = min(context, max_total_tokens or DEFAULT_MAX_TOTAL_TOKENS)
        if self.params.n != 1:
            raise ValueError(f"a conversation has one answer per message, got n = {self.params.n}")
        if max_total_tokens is not None and not 1 < max_total_tokens <= context:
            raise ValueError(
                f"max_total_tokens must be from 2 to the model's context, {context}, got "
                f"{max_total_tokens}"
            )
        if system is not None and model.chat_template is None:
            raise ValueError("the model has no chat template, so it takes no system message")
        self.system, self._plain_messages = system, plain_messages
        limit = model.config.short_text
        self.has_long_texts = limit is not None and self.capacity > limit
        page_size = model.options.page_size
        # A last page that is not full is copied before it grows.
        num_pages = -(-(self.capacity + num_speculative_tokens) // page_size) + 1
        self.cache = model.create_cache(
            1,
            num_pages * page_size,
            max(prefill_chunk_size, 1 + num_speculative_tokens),
            use_long_rope_factors=self.has_long_texts,
            prefix_cache=prefix_cache if isinstance(prefix_cache, PrefixCacheConfig) else None,
        )
        self._settings = Settings(
            max_total_tokens=None,
            prefill_chunk_size=prefill_chunk_size,
            max_num_sequences=1,
            window=None,
            num_speculative_tokens=num_speculative_tokens,
            on_peak_usage=None,
            kv_transfer_channel=None,
            prefix_cache=bool(prefix_cache),  # the cache has the tiers
            cache=self.cache,
            use_long_rope_factors=self.has_long_texts,
        )
        self.messages: list[dict[str, str]] = []
        self.tokens: list[int] = []
        self.last_turn = Turn()

    def reply(self, message: str) -> Iterator[str]:
        """Answer a message.

        An iterator that is closed early stops the answer and keeps what was said. A turn whose
        answer has no token leaves no trace.

        Yields
        ------
        str
            The answer in pieces. What the model thinks before is in `last_turn` at the end.

        Raises
        ------
        ContextFullError
            If there is no room for an answer. The conversation is as it was.
        ValueError
            If the message is empty, or the chat template refuses the messages.
        """
        prompt = self._prompt(message)
        room = self.capacity - len(prompt)
        if room < 1:
            raise ContextFullError(
                f"the context is full: the conversation with this message has {len(prompt)} "
                f"tokens, and at most {self.capacity - 1} leave room for an answer"
            )
        max_tokens = min(self.params.max_tokens, room)
        seed = self.params.seed + len(self.messages) // 2
        params = replace(self.params, max_tokens=max_tokens, seed=seed)
        self._remove_leftovers()
        return self._answer(message, prompt, params)

    def _answer(self, message: str, prompt: list[int], params: SamplingParams) -> Iterator[str]:
        start, turn = time.perf_counter(), Turn()
        run = Run(self.model, [prompt], params, self._settings)
        turn.statistics = run.batch.statistics
        parts = AnswerParts(self.model.tokenizer)
        tokens: list[int] = []
        try:
            with closing(run.events()) as events:
                for event in events:
                    if isinstance(event, TextEvent):
                        if not tokens:
                            turn.first_token_seconds = time.perf_counter() - start
                        tokens.append(event.token)
                        yield parts.take(event.token, event.text)
                    elif isinstance(event, FinishedEvent):
                        is_full = event.finish_reason == "length" and (
                            len(prompt) + len(tokens) == self.capacity
                        )
                        turn.finish_reason = "context" if is_full else event.finish_reason
        finally:
            self.last_turn, turn.thought = turn, parts.thought
            if tokens or turn.finish_reason == "stop":
                self.tokens = [*prompt, *tokens]
                self.messages.append({"role": "user", "content": message})
                answer = {"role": "assistant", "content": parts.said}
                if parts.thought:
                    answer["thinking"] = parts.thought
                self.messages.append(answer)

    def close(self, timeout: float = 60.0) -> bool:
        """Write what is pending to the store of a `prefix_cache`, and close it.

        Without a store it does nothing. The conversation can go on, without the store.

        Parameters
        ----------
        timeout : float
            Maximum seconds to wait.

        Returns
        -------
        bool
            Whether the store was closed in that time.
        """
        return self.cache.close_prefixes(timeout)

    def reset(self) -> None:
        """Forget all turns."""
        self.messages, self.tokens = [], []

    def trim(self) -> bool:
        """Drop the oldest turn; return whether there was one.

        Raises
        ------
        ValueError
            If the chat template refuses the messages that are left. The conversation is as it was.
        """
        if not self.messages:
            return False
        messages, tokens = self.messages[2:], []
        if messages and self.model.chat_template is not None:
            tokens = self._encode_chat(messages, add_generation_prompt=False)
        else:
            for message in messages:
                tokens += self._encode(message["content"], message["role"] == "user", not tokens)
        self.messages, self.tokens = messages, tokens
        return True

    def num_tokens(self) -> int:
        """Return the length of the conversation in tokens."""
        return len(self.tokens)

    def _prompt(self, message: str) -> list[int]:
        """Return the tokens that the model continues."""
        if not message.strip():
            raise ValueError("the message is empty")
        check_text("the message", message)
        if self.model.chat_template is None:
            return [*self.tokens, *self._encode(message, True, not self.tokens)]
        return self._encode_chat([*self.messages, {"role": "user", "content": message}])

    def _encode_chat(self, messages: list[dict[str, str]], **variables: bool) -> list[int]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        chat = [*system, *messages]
        return encode_chat(self.model, chat, plain_messages=self._plain_messages, **variables)

    def _encode(self, text: str, is_message: bool, is_first: bool) -> list[int]:
        """Return the tokens that a message or an answer adds to a text that is continued."""
        line = f"\n{text}" if is_message and not is_first else text
        tokenizer = self.model.tokenizer
        if self._plain_messages:
            tokenizer = plain_tokenizer(tokenizer, "")
        if is_first:
            return encode_text(tokenizer, line)
        return tokenizer.encode(line, add_special_tokens=False).ids

    def _remove_leftovers(self) -> None:
        """Remove what a KeyboardInterrupt has left behind."""
        if self.cache.is_in_forward:
            self.cache.abort_forward()
        for seq_id in self.cache.sequence_ids():
            self.cache.remove_sequence(seq_id)
