# SPDX-License-Identifier: Apache-2.0
"""Attention settings of a model's configuration that mlc-llm does not pass to its cache.

mlc-llm leaves out Gemma 2's soft-cap, and takes the sliding window of its and Gemma 3's local
layers for one of the whole model. Here they are read from the configuration of the model that is
being compiled.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .modules import find
from .patches import Patches


@dataclass(frozen=True)
class Attention:
    """Properties of a model's layers that mlc-llm's arguments do not say.

    Parameters
    ----------
    kinds : tuple of str, optional
        "mha" or "mha_sliding" for each layer; None: as mlc-llm says.
    window : int, optional
        Positions that a row of the "mha_sliding" layers sees.
    logit_softcap : float, optional
    """

    kinds: tuple[str, ...] | None = None
    window: int | None = None
    logit_softcap: float | None = None


_compiled: ContextVar[tuple[str, Any] | None] = ContextVar("model_being_compiled", default=None)


@contextmanager
def compiling(model_type: str, config: Any) -> Iterator[None]:
    """Within the context, caches are made for a model of this configuration.

    `install` enters it in mlc-llm's ``compile``; who calls mlc-llm's pipeline directly enters it
    around that.

    Parameters
    ----------
    model_type : str
        The model's name in mlc-llm, such as "gemma2".
    config : object
        mlc-llm's configuration of the model, such as a ``Gemma2Config``.
    """
    token = _compiled.set((model_type, config))
    try:
        yield
    finally:
        _compiled.reset(token)


def attention_of_compiled(num_layers: int) -> Attention:
    """Return the properties of the model that is being compiled."""
    model = _compiled.get()
    if model is None:
        return Attention()
    model_type, config = model
    read = _READERS.get(model_type)
    return read(config, num_layers) if read else Attention()


def warn_if_unknown(model_type: str) -> None:
    """Warn where a model of this type is compiled and its configuration is not known."""
    if model_type in _READERS and _compiled.get() is None:
        warnings.warn(
            f"the configuration of this {model_type} is not known, so its attention has no "
            "soft-cap and the default window; run the pipeline within "
            "tvm_pagedkv.mlc.compiling(model_type, config)",
            RuntimeWarning,
            stacklevel=3,
        )


def _gemma2(config: Any, num_layers: int) -> Attention:
    kinds = _kinds(config, num_layers, lambda layer: layer % 2 == 0)
    return Attention(kinds, config.sliding_window, config.attn_logit_softcapping)


def _gemma3(config: Any, num_layers: int) -> Attention:
    text = config.text_config
    pattern = text.sliding_window_pattern
    kinds = _kinds(text, num_layers, lambda layer: (layer + 1) % pattern != 0)
    return Attention(kinds, text.sliding_window_size)


def _kinds(config: Any, num_layers: int, is_sliding: Callable[[int], bool]) -> tuple[str, ...]:
    """Return the kinds of ``layer_types``, or else of the family's pattern."""
    types = (config.kwargs or {}).get("layer_types")
    if types is None:
        return tuple("mha_sliding" if is_sliding(i) else "mha" for i in range(num_layers))
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries for {num_layers} layers")
    return tuple("mha_sliding" if each == "sliding_attention" else "mha" for each in types)


_READERS = {"gemma2": _gemma2, "gemma3": _gemma3, "gemma3_text": _gemma3}


def remember_compiled_model(patches: Patches) -> None:
    """Let mlc-llm's ``compile`` say which model it compiles."""
    module = find("mlc_llm.interface.compile", "_compile")
    original = module._compile

    @functools.wraps(original)
    def compile_known(args: Any, model_config: Any) -> Any:
        with compiling(args.model.name, model_config):
            return original(args, model_config)

    patches.set(module, "_compile", compile_known)


def keep_layer_windows(patches: Patches) -> None:
    """Keep windows of layers from limiting the whole model.

    mlc-llm cuts Gemma 2's context to the window of its local layers, and gives every sequence of a
    Gemma 3 that window. With windows of layers there is no reason to.
    """
    gemma2 = find("mlc_llm.model.gemma2.gemma2_model", "Gemma2Config").Gemma2Config
    gemma3 = find("mlc_llm.model.gemma3.gemma3_model", "Gemma3Config").Gemma3Config
    set_up_gemma2, set_up_gemma3 = gemma2.__post_init__, gemma3.__post_init__

    def whole_context(config: Any) -> None:
        given = config.context_window_size or config.kwargs.get("max_position_embeddings", 0)
        set_up_gemma2(config)
        config.context_window_size = given or config.context_window_size

    def no_sequence_window(config: Any) -> None:
        set_up_gemma3(config)
        config.sliding_window_size = -1

    patches.set(gemma2, "__post_init__", whole_context)
    patches.set(gemma3, "__post_init__", no_sequence_window)
