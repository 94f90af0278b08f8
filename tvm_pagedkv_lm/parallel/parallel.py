# SPDX-License-Identifier: Apache-2.0
"""`ParallelModel`: a model that several workers of one machine run together.

The workers divide the layers (pipeline stages) and the heads of each layer (shards). Every worker
has its own KV cache for its layers and KV heads; all caches hold the same sequences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from tvm_pagedkv.compiler import resolve_target, vector_target
from tvm_pagedkv.config import check_positive
from tvm_pagedkv.distributed import process_session, threaded_session

from ..blocks.mixers import Mixer
from ..config.decoder_config import DecoderConfig
from ..config.default_dtype import default_dtype
from ..config.options import BuildOptions, check_batch_invariant, check_states
from ..config.part import AttentionPart, LayerPart
from ..model.decoder_weights import matrix_bytes
from ..model.executable import executable_file
from ..model.model import check_cache, read_model
from ..model.source import load_tokenizer
from ..model.weight_choice import check_weights, with_formats
from ..text.chat import ChatTemplate
from ..text.tokens import check_batch, check_tokens
from . import parallel_worker  # noqa: F401  workers of this process find its function
from .parallel_cache import ParallelCache
from .parallel_workers import Workers


def resolve_stages(stages: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the first layer of each pipeline stage, then `num_layers`.

    Parameters
    ----------
    stages : int or sequence of int
        The number of stages, which get equal numbers of layers as far as possible; or the result.

    Raises
    ------
    ValueError
        If a stage has no layer, or a layer no stage.
    """
    if isinstance(stages, int):
        if not 1 <= stages <= num_layers:
            raise ValueError(f"stages must be between 1 and {num_layers}, the layers; got {stages}")
        return tuple(-(-i * num_layers // stages) for i in range(stages + 1))
    indptr = tuple(int(begin) for begin in stages)
    rises = all(a < b for a, b in zip(indptr, indptr[1:], strict=False))
    if len(indptr) < 2 or (indptr[0], indptr[-1]) != (0, num_layers) or not rises:
        raise ValueError(
            f"stages must begin with 0, rise, and end with the number of layers, {num_layers}; got "
            f"{list(indptr)}"
        )
    return indptr


def check_shards(config: DecoderConfig, num_shards: int) -> None:
    """Raise a ValueError if the number of shards does not divide the heads and the MLP."""
    if num_shards < 1:
        raise ValueError(f"num_shards must be at least 1, got {num_shards}")
    parts = sorted(config.parts, key=_place)
    for part in parts:
        if num_shards > 1 and part.whole_because:
            raise ValueError(f"num_shards must be 1: {part.whole_because}; got {num_shards}")
    counts = [each for part in parts for each in part.shared_counts.items()]
    for name, count in counts:
        if count % num_shards:
            raise ValueError(
                f"num_shards must divide {name} ({count}) of the model, got {num_shards}"
            )


def _place(part: LayerPart) -> int:
    """Return the order in which errors name parts: attention first, states last."""
    return 0 if isinstance(part, AttentionPart) else 2 if isinstance(part, Mixer) else 1


def check_stages(config: DecoderConfig, layer_indptr: Sequence[int]) -> None:
    """Raise a ValueError if layers of a model cannot be in these stages.

    Parameters
    ----------
    config : DecoderConfig
    layer_indptr : sequence of int
        As `resolve_stages` returns it.
    """
    num_stages = len(layer_indptr) - 1
    if num_stages > 1 and config.is_connected:
        raise ValueError(
            "stages must be 1: the model has layers that attend to the K and V of others, or "
            f"per-layer embeddings (Gemma 3n and 4), which one stage must have; got {num_stages}"
        )
    choosing = [
        i
        for i, layer in enumerate(config.layers)
        if layer.attention is None or layer.attention.chooses_positions
    ]
    for begin in layer_indptr[:-1]:
        if begin not in choosing:
            chooses = max(layer for layer in choosing if layer < begin)
            raise ValueError(
                f"a stage may not begin with layer {begin}, which attends to the positions that "
                f"layer {chooses} has chosen; layers that choose: {choosing}"
            )


class ParallelModel:
    """A decoder like `DecoderModel`, run by ``num_shards * number of stages`` workers.

    Make one with `from_pretrained`. It is a context manager. The workers end with `close`, when
    nothing refers to the model and its caches, or with the process.
    """

    def __init__(
        self,
        config: DecoderConfig,
        stages: Sequence[BuildOptions],
        tokenizer,
        workers: Workers,
        chat_template: ChatTemplate | None = None,
        sampling: dict[str, Any] | None = None,
    ):
        self.config, self.options, self.tokenizer = config, stages[0], tokenizer
        self._stages = tuple(stages)
        self.chat_template, self.sampling = chat_template, sampling or {}
        self._workers, self.close = workers, workers.close

    def __enter__(self) -> ParallelModel:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        dtype: str | None = None,
        *,
        num_shards: int = 1,
        stages: int | Sequence[int] = 1,
        page_size: int = 16,
        sliding_window: bool = False,
        kv_dtype: str | None = None,
        state_dtype: str = "float32",
        weights: str = "auto",
        batch_invariant: bool = False,
        threads: bool = False,
        timeout: float | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> ParallelModel:
        """Load a model for this machine.

        Parameters
        ----------
        model, dtype, page_size, sliding_window, kv_dtype, state_dtype, weights, progress
            As for `DecoderModel.from_pretrained`.
        batch_invariant
            As for `DecoderModel.from_pretrained`.
        num_shards : int
            Number of workers per layer: a divisor of its heads, KV heads and MLP features.
        stages : int or sequence of int
            Pipeline stages: their number, or the first layer of each, then the number of layers.
        threads : bool
            Whether workers are threads. Otherwise all but the first are processes.
        timeout : float, optional
            Seconds that a call of the model or of its caches waits for the worker processes. Then
            they are ended, and the call raises a RuntimeError, as do later ones. None: no limit.
            Not with `threads`.

        Returns
        -------
        ParallelModel

        Raises
        ------
        FileNotFoundError, ValueError, RuntimeError
            As `DecoderModel.from_pretrained`; ValueError also if the model cannot be divided so.
        """
        check_weights(weights)
        if timeout is not None:
            timeout = check_positive("timeout", timeout)
            if threads:
                raise ValueError("timeout is for worker processes: threads cannot be ended")
        source, config = read_model(model, dtype)
        dtype = dtype or default_dtype(config, vector_target())
        check_shards(config, num_shards)
        check_states(config, state_dtype)
        check_batch_invariant(config, batch_invariant)
        if config.longest_text is not None:
            raise ValueError(
                "several workers do not run models with a dynamic rotation, as that in "
                f"{source.path}"
            )
        indptr = resolve_stages(stages, config.num_layers)
        check_stages(config, indptr)
        num_stages = len(indptr) - 1
        # Compiled here, so that the workers find the files in the disk cache.
        options = [
            BuildOptions(
                dtype,
                page_size,
                resolve_target(None),
                sliding_window,
                num_shards=num_shards,
                layer_indptr=indptr,
                stage=stage,
                kv_dtype=kv_dtype,
                state_dtype=state_dtype,
                batch_invariant=batch_invariant,
            )
            for stage in range(num_stages)
        ]
        check_cache(source, config, options[0])
        tokenizer, config = load_tokenizer(source, config)
        template, sampling = source.chat_template(), source.sampling()
        tensors = source.tensors()
        options = [with_formats(each, config, tensors, weights) for each in options]
        for each in options:
            executable_file(config, each, progress)

        make = threaded_session if threads else process_session
        session = make(num_shards * num_stages, num_stages)
        session.import_python_module(parallel_worker.__name__)
        described = {
            "model": str(source.path.resolve()),
            "dtype": dtype,
            "page_size": page_size,
            "sliding_window": sliding_window,
            "kv_dtype": kv_dtype,
            "state_dtype": state_dtype,
            "weights": weights,
            "batch_invariant": batch_invariant,
            "num_shards": num_shards,
            "layer_indptr": indptr,
        }
        workers = Workers(session, timeout)
        workers.load(json.dumps(described))
        return cls(config, options, tokenizer, workers, template, sampling)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices that multiply the rows of a step, of all workers."""
        return matrix_bytes(self.config, self._stages)

    @property
    def expert_bytes(self) -> int:
        """Bytes of those that belong to experts, of which a row needs a few."""
        return matrix_bytes(self.config, self._stages, only_experts=True)

    # --- steps ----------------------------------------------------------------------------------

    def create_cache(
        self,
        max_num_sequences: int,
        max_total_tokens: int,
        prefill_chunk_size: int = 512,
        *,
        use_long_rope_factors: bool = False,
    ) -> ParallelCache:
        """Make an empty cache for this model; see `DecoderModel.create_cache`."""
        sizes = (
            max_num_sequences,
            max_total_tokens,
            prefill_chunk_size,
            int(use_long_rope_factors),
        )
        return ParallelCache.create(self._workers, *sizes)

    def prefill(
        self, cache: ParallelCache, seq_ids: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """Append ``tokens[i]`` to sequence ``seq_ids[i]``, and compute the last logits of each.

        Returns
        -------
        logits : float32 ``[len(seq_ids), vocab_size]``

        Raises
        ------
        TypeError, ValueError, CacheFullError
            As `DecoderModel.prefill`; ValueError also if another model has made the cache.
        """
        return self._step(cache, "prefill", seq_ids, tokens)

    def decode(
        self, cache: ParallelCache, seq_ids: Sequence[int], tokens: Sequence[int]
    ) -> np.ndarray:
        """Append one token to each sequence, and compute the logits.

        Returns
        -------
        logits : float32 ``[len(seq_ids), vocab_size]``
        """
        ids = check_tokens("tokens", tokens, self.config.vocab_size)
        return self._step(cache, "decode", seq_ids, ids[:, None])

    def logits(
        self, cache: ParallelCache, seq_ids: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """Append tokens as `prefill` does, and compute the logits of every row.

        Returns
        -------
        list of float32 ``[len(tokens[i]), vocab_size]``
        """
        rows = self._step(cache, "decode", seq_ids, tokens)
        return np.split(rows, np.cumsum([len(part) for part in tokens])[:-1])

    def _step(self, cache, name, seq_ids, tokens) -> np.ndarray:
        self.check_cache(cache)
        ids = check_batch(tokens, self.config.vocab_size)
        lengths = [len(part) for part in tokens]
        shapes = (tvm_ffi.Shape(tuple(numbers)) for numbers in (seq_ids, lengths, ids.tolist()))
        return cache.step(name, *shapes)[-1].numpy()

    def check_cache(self, cache: object) -> None:
        """Raise a ValueError if a cache was not made by this model, whose workers have others."""
        if not (isinstance(cache, ParallelCache) and cache.belongs_to(self._workers)):
            raise ValueError("the cache must be one that this model has made (create_cache)")

    # --- workers --------------------------------------------------------------------------------

    def workers(self) -> list[dict[str, Any]]:
        """Describe each worker: process, layers, heads, kv_heads, weight_bytes."""
        return self._call("describe")

    def _call(self, command: str, *args: Any) -> list[Any]:
        return self._workers.call(command, *args)
