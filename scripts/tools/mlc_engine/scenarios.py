# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked to do; each answer is compared with that of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from .engine import PAGE_SIZE, Engine

COUNT = 32  # tokens of an answer
_TEXT = (
    "The with statement is used to wrap the execution of a block with methods defined by a context "
    "manager. A class definition is an executable statement. The try statement specifies handlers "
    "for a group of statements. Function calls always assign values to all parameters."
)


class Scenarios:
    """Requests to engines over one kind of cache.

    Parameters
    ----------
    open_engine : callable
        ``open_engine(drafts=False, disaggregation=False, hybrid=False, **settings)`` starts an
        engine.
    continuation : callable
        ``continuation(tokens, count, hybrid=False)`` is what transformers generates.
    seed : int
    """

    def __init__(
        self,
        open_engine: Callable[..., Engine],
        continuation: Callable[..., list[int]],
        seed: int,
    ):
        self._open, self._continuation = open_engine, continuation
        self._random = random.Random(seed)

    def batch(self) -> dict[str, Any]:
        """Prompts of unequal lengths, more than fit a batch, prefilled in chunks beside decode."""
        engine = self._open(prefix_cache_mode="disable")
        self._check(engine, [self._prompt(length) for length in (1, 3, 17, 64, 65, 130, 200) * 2])
        return _tokens(engine)

    def prefix_cache(self) -> dict[str, Any]:
        """Prompts that begin like others, running ones and finished ones, and a second turn."""
        engine = self._open()
        start = self._prompt(100)
        prompts = [start + self._prompt(length) for length in (5, 9, 33)]
        prompts += [start[:50] + self._prompt(7), start[: 4 * PAGE_SIZE]]
        self._check(engine, prompts)
        answers = [prompt + self._continuation(prompt, COUNT) for prompt in prompts]
        self._check(engine, [answer + self._prompt(4) for answer in answers[:3]])
        asked = sum(len(prompt) for prompt in prompts) + sum(len(a) + 4 for a in answers[:3])
        computed = engine.metrics()["prefill_tokens_sum"]
        assert computed < asked / 2, f"{computed} of {asked} tokens were computed"
        return _tokens(engine) | {"tokens of prompts": asked}

    def continuations(self) -> dict[str, Any]:
        """Three continuations of each prompt, from forks of one sequence."""
        engine = self._open()
        self._check(engine, [self._prompt(70), self._prompt(9)], n=3)
        return _tokens(engine)

    def abort(self) -> dict[str, Any]:
        """Requests that end half way, while others run; then the same prompts again."""
        engine = self._open()
        prompts = [self._prompt(length) for length in (90, 40, 20, 150)]
        names = [engine.start(prompt, COUNT) for prompt in prompts]
        for _ in range(6):
            engine.step()
        for name in names[:2]:
            engine.abort(name)
        for name, prompt in zip(names[2:], prompts[2:], strict=True):
            self._compare(prompt, engine.finish(name))
        self._check(engine, prompts)
        return _tokens(engine)

    def drafts(self) -> dict[str, Any]:
        """Four tokens drafted by a second model, verified at once; rejected ones are popped."""
        engine = self._open(drafts=True, speculative_mode="small_draft", spec_draft_length=4)
        self._check(engine, [self._prompt(length) for length in (20, 66)])
        self._check(engine, [self._prompt(length) for length in (5, 31)])
        counts = engine.metrics()["spec_decode"]
        drafted, accepted = sum(counts["draft_count"]), sum(counts["accept_count"])
        assert 0 < accepted < drafted, f"{accepted} of {drafted} drafts were accepted"
        return _tokens(engine) | {"drafted": drafted, "accepted": accepted}

    def disaggregation(self) -> dict[str, Any]:
        """One engine computes the prompt, and sends its rows to another one, which goes on."""
        from .transfer import connect

        prefill, decode = (self._open(disaggregation=True) for _ in range(2))
        sent = connect(prefill.caches[0], decode.caches[0], number=1)
        for length in (40, 130, 7):
            prompt = self._prompt(length)
            window = {"kv_window_begin": 0, "kv_window_end": -1}
            config = {"kind": "prepare_receive", **window}
            name = decode.start(prompt, COUNT, disagg_config=config)
            prepared = decode.wait_for_extra(name)
            begin, end = prepared["prefix_matched_length"], len(prompt) - 1
            config = {
                "kind": "remote_send",
                "kv_append_metadata": prepared["kv_append_metadata"],
                "kv_window_begin": begin,
                "kv_window_end": end,
                "dst_group_offset": 1,
            }
            prefill.wait_for_extra(prefill.start(prompt, COUNT, disagg_config=config))
            config = {"kind": "start_generation", "kv_window_begin": end}
            decode.start(prompt, COUNT, name=name, disagg_config=config)
            self._compare(prompt, decode.finish(name))
        return {"rows sent": sum(sent)}

    def hybrid(self) -> dict[str, Any]:
        """Sequences of a model with a cache and a recurrent state, which decode together.

        Each prompt is prefilled by itself: mlc-llm's hybrids take the rows of a prefill for one
        sequence, and its engine does not know that.
        """
        engine = self._open(hybrid=True, prefix_cache_mode="disable", prefill_mode="chunked")
        for lengths in ((9, 3, 40, 3), (100, 3, 9, 65), (64, 1, 17, 130)):
            prompts = [self._prompt(length) for length in lengths]
            names = []
            for prompt in prompts:
                names.append(engine.start(prompt, COUNT))
                while engine.count(names[-1]) == 0:
                    engine.step()
            for name, prompt in zip(names, prompts, strict=True):
                self._compare(prompt, engine.finish(name), hybrid=True)
        return _tokens(engine)

    def _prompt(self, length: int) -> list[int]:
        """Bytes of text from a random position on, which are the model's tokens."""
        start = self._random.randrange(len(_TEXT) - length)
        return [*_TEXT[start : start + length].encode()]

    def _check(self, engine: Engine, prompts: list[list[int]], n: int = 1) -> None:
        answers = engine.generate(prompts, COUNT, n)
        for prompt, texts in zip(prompts, answers, strict=True):
            self._compare(prompt, texts)

    def _compare(self, prompt: list[int], answers: list[list[int]], hybrid: bool = False) -> None:
        wanted = self._continuation(prompt, COUNT, hybrid)
        for answer in answers:  # drafts may go on for some tokens
            assert answer[:COUNT] == wanted, f"{len(prompt)} tokens: {answer} instead of {wanted}"


NAMES = (
    "batch",
    "prefix_cache",
    "continuations",
    "abort",
    "drafts",
    "disaggregation",
    "hybrid",
)


def _tokens(engine: Engine) -> dict[str, Any]:
    metrics = engine.metrics()
    return {
        "prefilled": int(metrics["prefill_tokens_sum"]),
        "generated": int(metrics["completion_tokens_sum"]),
    }
