# SPDX-License-Identifier: Apache-2.0
"""Parameters of `generate`, prompt encoding, and sampling of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_pagedkv.config import check_int

from ..model.model import DecoderModel
from ..text.tokens import check_tokens, encode_text


@dataclass(frozen=True)
class SamplingParams:
    """Settings of how to continue a prompt.

    Parameters
    ----------
    n : int
        Number of continuations per prompt.
    temperature : float
        0 takes the most likely token.
    top_p : float
        Sample from the smallest set of most likely tokens with at least this total probability; 0:
        take the most likely token.
    top_k : int
        Sample from this many most likely tokens; 0: from all. It applies before `top_p`.
    repetition_penalty : float
        Divides positive logits of the tokens in the text so far, and multiplies negative ones.
    stop : tuple of str
        Strings that end a continuation, which stops before them.
    max_tokens : int
        Maximum number of tokens of a continuation.
    seed : int
        Continuation i of any prompt uses a random generator seeded with (seed, i), whatever else is
        in the batch. Logits may differ in their last bits from those in another batch: where a step
        saves 512 or more positions by shared reads (``share_prefix`` of `KVCacheConfig`) or linear
        layers use AMX, unless the model is loaded with ``batch_invariant=True``; where a text of
        the call needs the long factors of longrope, or an attention budget applies; and where a
        prompt is cut into other chunks, if it has layers with windows or a chunk of one row.

    Raises
    ------
    ValueError, TypeError
        If a value is out of range; the message names the field.
    """

    n: int = 1
    temperature: float = 0.7
    top_p: float = 0.95
    max_tokens: int = 200
    seed: int = 0
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    @classmethod
    def for_model(cls, model: DecoderModel, **given: Any) -> SamplingParams:
        """Return the parameters that the makers of a model recommend, with others in their place.

        Parameters
        ----------
        model : DecoderModel or ParallelModel
        **given
            Fields of this class. One that is None was not given.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        return cls(**{**model.sampling, **chosen})

    def __post_init__(self) -> None:
        check_int("n", self.n)
        if not (self.temperature >= 0 and np.isfinite(self.temperature)):
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must be in [0, 1], got {self.top_p}")
        check_int("max_tokens", self.max_tokens)
        check_int("seed", self.seed, 0, 2**63 - 1)
        check_int("top_k", self.top_k, 0)
        if not (self.repetition_penalty > 0 and np.isfinite(self.repetition_penalty)):
            raise ValueError(f"repetition_penalty must be positive, got {self.repetition_penalty}")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop must be a tuple of non-empty strings, got {self.stop!r}")


@dataclass(frozen=True)
class Window:
    """A sliding window with attention sinks, for texts of any length.

    Parameters
    ----------
    size : int
        Number of tokens to keep, less than the model's context.
    sinks : int
        Number of these that are the first tokens of the text; the others are the most recent ones.
    """

    size: int
    sinks: int = 0

    def __post_init__(self) -> None:
        check_int("the window", self.size)
        check_int("sinks", self.sinks, 0)
        if self.sinks >= self.size:
            raise ValueError(
                f"sinks must be at least 0 and fewer than the window ({self.size}), got "
                f"{self.sinks}"
            )

    def check(self, model: DecoderModel) -> None:
        """Raise a ValueError if the model cannot use the window."""
        if not model.options.sliding_window:
            raise ValueError("load the model with sliding_window=True to give texts a window")
        if self.size >= model.config.context_length:
            raise ValueError(
                f"the window must be less than the model's context ({model.config.context_length} "
                f"tokens), got {self.size}"
            )


def check_text(name: str, text: str) -> None:
    """Raise a ValueError for a text with halves of characters, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error.reason} at {error.start}") from None


def encode_prompt(
    model: DecoderModel, index: int, prompt: str | Sequence[int], fits_context: bool
) -> list[int]:
    """Return the token ids of a prompt; raise a ValueError if it is invalid."""
    given: Sequence[int]
    if isinstance(prompt, str):
        check_text(f"prompt {index + 1}", prompt)
        given = encode_text(model.tokenizer, prompt) if prompt else []
    else:
        given = prompt
    tokens = check_tokens(f"prompt {index + 1}", given, model.config.vocab_size).tolist()
    if not tokens:
        raise ValueError(f"prompt {index + 1} is empty")
    if fits_context and len(tokens) >= model.config.context_length:
        raise ValueError(
            f"prompt {index + 1} has {len(tokens)} tokens; the model's context holds "
            f"{model.config.context_length} with at least one for the continuation"
        )
    return tokens


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    random: np.random.Generator,
    text: Sequence[int] = (),
) -> int:
    """Sample a token.

    Parameters
    ----------
    logits : float32 ``[vocab_size]``
        Tokens with a logit of -inf are never sampled.
    params : SamplingParams
    random : numpy.random.Generator
    text : sequence of int
        The tokens so far, for `repetition_penalty`.

    Returns
    -------
    int
        The token id.

    Raises
    ------
    ValueError
        If a logit is NaN or +inf, or all are -inf.
    """
    if logits.ndim != 1 or not len(logits):
        raise ValueError(f"logits must have shape [vocab_size], got {list(logits.shape)}")
    top = logits.max()  # NaN, if there is one
    if not np.isfinite(top):
        raise ValueError(
            f"logits must be finite, but for those of -inf; the largest of {len(logits)} is {top}"
        )
    if params.repetition_penalty != 1 and len(text):
        logits = logits.copy()
        seen = np.unique(np.asarray(text))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        top = logits.max()
    if params.temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # to -inf
        weights = np.exp((logits.astype("float64") - top) / params.temperature)
    if 0 < params.top_k < len(weights):
        others = np.argsort(-weights, kind="stable")[params.top_k :]
        weights[others] = 0
    weights /= weights.sum()
    if params.top_p < 1:
        # Tokens below this bound cannot be in the nucleus, so they are not sorted.
        likely = np.flatnonzero(weights >= (1 - params.top_p) / len(weights))
        order = likely[np.argsort(-weights[likely], kind="stable")]
        count = int(np.searchsorted(np.cumsum(weights[order]), params.top_p)) + 1
        order = order[:count]
    else:
        order = np.arange(len(weights))
    cumulative = np.cumsum(weights[order])
    chosen = np.searchsorted(cumulative, random.random() * cumulative[-1], side="right")
    return int(order[min(chosen, len(order) - 1)])
