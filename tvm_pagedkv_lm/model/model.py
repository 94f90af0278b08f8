# SPDX-License-Identifier: Apache-2.0
"""`DecoderModel`: a checkpoint becomes compiled code, weights and a tokenizer."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import tvm
from tvm.target import Target

from tvm_pagedkv.cache import KVCache
from tvm_pagedkv.compiler import load_library, resolve_target, vector_target
from tvm_pagedkv.config import DTYPES, PrefixCacheConfig

from ..config.decoder_config import DecoderConfig
from ..config.default_dtype import default_dtype
from ..config.options import BuildOptions, check_batch_invariant, check_states, layer_budgets
from ..text.tokens import check_batch, check_tokens
from ..weights.static_scales import layer_scales
from .caches import Caches, cache_config
from .decoder_weights import load_parameters, matrix_bytes
from .executable import executable_file
from .machines import Machines
from .source import ModelSource, load_tokenizer, open_model
from .weight_choice import check_weights, with_formats


class DecoderModel:
    """A decoder ready to run on the CPU.

    Parameters
    ----------
    config : DecoderConfig
    options : BuildOptions
    library : Path
        The compiled functions of `decoder.Decoder`.
    parameters : list of tvm tensors
        Weights, in the order of the library's functions.
    tokenizer : tokenizers.Tokenizer, optional
    chat_template : ChatTemplate, optional
        None where the checkpoint has none.
    sampling : dict, optional
        The sampling parameters that the model's makers recommend.
    source : ModelSource, optional
        Where the weights come from.

    Attributes
    ----------
    content_digest : str
        A name for the configuration and the weights, which copies on other machines have as well.
        Empty without a source.
    fingerprint : str
        A name for these, the tokenizer and the chat template, as of `models.fingerprint`.
    """

    def __init__(
        self,
        config,
        options,
        library,
        parameters,
        tokenizer=None,
        chat_template=None,
        sampling=None,
        source=None,
    ):
        self.config, self.options, self.tokenizer = config, options, tokenizer
        self.chat_template, self.sampling = chat_template, sampling or {}
        self.library, self.parameters = library, parameters
        # Now, for the files may be replaced while the model runs.
        self.content_digest = "" if source is None else source.content_digest()
        self.fingerprint = "" if source is None else source.fingerprint()
        # What K and V depend on. Weights without a source are those of no other model.
        self._name = f"{self.content_digest or uuid.uuid4().hex} {options.precision}"
        self._caches = Caches(config, options)
        functions = ("embed", "prefill", "decode")
        self._machines = Machines(load_library(library, options.target), functions)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        dtype: str | None = None,
        *,
        page_size: int = 16,
        sliding_window: bool = False,
        kv_dtype: str | None = None,
        weights: str = "auto",
        attention_budget: int | None = None,
        state_dtype: str = "float32",
        kv_scales: str = "row",
        batch_invariant: bool = False,
        target: Target | str | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> DecoderModel:
        """Load a model. Compiled code is kept in the disk cache.

        Parameters
        ----------
        model : path, optional
            A folder with config.json, ``*.safetensors`` and tokenizer.json, a GGUF file, or a
            name, as `find_model` takes it; None: the small model in this package.
        dtype : {"float32", "float16", "bfloat16"}, optional
            Type of weights and activations. None: ``dtype`` or ``torch_dtype`` of config.json, or
            float32; for a GGUF file the type of its matrices, or float16 if these are quantized.
            In place of float16, Gemma runs in bfloat16, and CPUs without conversion of float16 run
            in float32.
        page_size : int
            Slots per page of the model's caches.
        sliding_window : bool
            Whether sequences can get a sliding window. K and Q are then rotated inside attention.
        kv_dtype : str, optional
            Type of the pages, or the codec that quantizes them, as for `KVCacheConfig`; None:
            `dtype`.
        weights : {"auto", "float", "int8", "int4"}
            How matrices are kept. "float": as numbers of type `dtype`. "int8", "int4": quantized,
            in groups of 32 input features; with "int4" the vocabulary has 8 bits. "auto": matrices
            that are quantized in a GGUF file stay so: Q8_0, Q4_0 and Q4_1 keep their codes, other
            types are rounded to 8 bits.
        attention_budget : int, optional
            The positions that each KV head attends to in a decode step, at least two pages, in
            layers that keep K and V of all positions: those of the pages with the largest bounds on
            ``q . k``. Prefill attends to everything. None: so does decode.
        state_dtype : {"float32", "float16", "bfloat16"}
            Type of the states of recurrent layers, as for `RecurrentConfig`.
        kv_scales : {"row", "checkpoint"}
            By what "int8" and "float8_e4m3fn" of `kv_dtype` scale K and V: the largest value of
            each row, or the static scales with which the checkpoint was calibrated.
        batch_invariant : bool
            Whether nothing in a step depends on the other sequences in it: caches never read pages
            once for several of them (``share_prefix``), and linear layers never use AMX.
        target : str or tvm.target.Target, optional
            A CPU, as `tvm_pagedkv.create` takes it; None: this machine.
        progress : callable, optional
            Called with a line of text before and after a compilation, which is logged as well.

        Returns
        -------
        DecoderModel

        Raises
        ------
        FileNotFoundError
            If the model or one of its files is missing.
        ValueError
            If the architecture is unknown, or a tensor is missing or has the wrong shape, or if a
            budget is too small, or the model has no layer for it, or for a `state_dtype`, or if the
            checkpoint has no `kv_scales`, or if `batch_invariant` is combined with a budget or a
            longrope rotation.
        TypeError
            If `batch_invariant` is not a bool.
        RuntimeError
            If compiling or linking fails.
        """
        check_weights(weights)
        source, config = read_model(model, dtype)
        check_batch_invariant(config, batch_invariant, attention_budget)
        tensors = source.tensors()
        options = BuildOptions(
            dtype or default_dtype(config, vector_target(target)),
            page_size,
            resolve_target(target),
            sliding_window,
            kv_dtype=kv_dtype,
            state_dtype=state_dtype,
            budgets=layer_budgets(config, attention_budget, page_size),
            kv_scales=layer_scales(config, tensors, kv_scales, kv_dtype),
            batch_invariant=batch_invariant,
        )
        check_states(config, state_dtype)
        check_cache(source, config, options)
        options = with_formats(options, config, tensors, weights)
        tokenizer, config = load_tokenizer(source, config)
        template, sampling = source.chat_template(), source.sampling()
        parameters = load_parameters(config, options, tensors)
        library = executable_file(config, options, progress)
        return cls(config, options, library, parameters, tokenizer, template, sampling, source)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices that multiply the rows of a step."""
        return matrix_bytes(self.config, [self.options])

    @property
    def expert_bytes(self) -> int:
        """Bytes of those that belong to experts, of which a row needs a few."""
        return matrix_bytes(self.config, [self.options], only_experts=True)

    # --- steps ----------------------------------------------------------------------------------

    def create_cache(
        self,
        max_num_sequences: int,
        max_total_tokens: int,
        prefill_chunk_size: int = 512,
        enable_kv_transfer: bool = False,
        *,
        share_prefix: bool = True,
        use_long_rope_factors: bool = False,
        prefix_cache: PrefixCacheConfig | None = None,
    ) -> KVCache:
        """Make an empty cache for this model.

        Parameters
        ----------
        max_num_sequences, max_total_tokens, prefill_chunk_size, enable_kv_transfer, share_prefix
            As for `KVCacheConfig`.
        use_long_rope_factors : bool
            For models with longrope: rotate all positions by the long factors, which texts need
            that will exceed the original context. Otherwise a step uses the long factors only if it
            ends beyond that length, and earlier rows of K keep the short ones.
        prefix_cache : PrefixCacheConfig, optional
            Tiers below the pages, which keep what the pool has no room for. To its `model_id` are
            added `content_digest` and the types of weights and activations, so pages of another
            model are never used.

        Returns
        -------
        KVCache
        """
        cache = self._caches.create(
            (max_num_sequences, max_total_tokens, prefill_chunk_size),
            enable_kv_transfer=enable_kv_transfer,
            share_prefix=share_prefix,
            use_long_rope_factors=use_long_rope_factors,
            prefix_cache=self._with_name(prefix_cache),
        )
        cache.model_name = self._name
        return cache

    def check_cache(self, cache: object) -> None:
        """Raise a ValueError unless this model has made a cache, or one of the same K and V."""
        if not (isinstance(cache, KVCache) and cache.model_name == self._name):
            raise ValueError(
                "the cache must be one that this model has made (create_cache), or a model with "
                "the same weights and types"
            )

    def _with_name(self, tiers: PrefixCacheConfig | None) -> PrefixCacheConfig | None:
        """Return a configuration of tiers whose pages are those of this model."""
        if tiers is None:
            return None
        return replace(tiers, model_id=f"{tiers.model_id} {self.content_digest}".strip())

    def prefill(
        self, cache: KVCache, seq_ids: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """Append ``tokens[i]`` to sequence ``seq_ids[i]``, and compute the last logits of each.

        Returns
        -------
        logits : float32 ``[len(seq_ids), vocab_size]``

        Raises
        ------
        TypeError
            If a token is not an integer.
        ValueError
            If a token is not in the vocabulary, or a text is too long for the model's RoPE. The
            cache stays as it was.
        CacheFullError
            If too few pages are available.
        """
        ids = check_batch(tokens, self.config.vocab_size)
        lengths = [len(part) for part in tokens]
        self._check_length(cache, seq_ids, lengths)
        rows = np.cumsum(lengths, dtype="int32") - 1
        with self._machines.borrow() as run, cache.forward(seq_ids, lengths):
            x = run["embed"](tvm.runtime.tensor(ids), self.parameters)
            logits = run["prefill"](x, tvm.runtime.tensor(rows), cache, self.parameters)
        return logits.numpy()

    def decode(self, cache: KVCache, seq_ids: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Append one token to each sequence, and compute the logits.

        Returns
        -------
        logits : float32 ``[len(seq_ids), vocab_size]``

        Raises
        ------
        TypeError, ValueError, CacheFullError
            As `prefill`.
        """
        ids = check_tokens("tokens", tokens, self.config.vocab_size)
        self._check_length(cache, seq_ids, [1] * len(ids))
        with self._machines.borrow() as run, cache.forward(seq_ids, [1] * len(ids)):
            x = run["embed"](tvm.runtime.tensor(ids), self.parameters)
            logits = run["decode"](x, cache, self.parameters)
        return logits.numpy()

    def logits(
        self,
        cache: KVCache,
        seq_ids: Sequence[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> list[np.ndarray]:
        """Append tokens as `prefill` does, and compute the logits of every row.

        Parameters
        ----------
        parents : sequence of sequences of int, optional
            The parent of each token in the token tree of its sequence. Call `KVCache.commit_tree`
            after this step.

        Returns
        -------
        list of float32 ``[len(tokens[i]), vocab_size]``
        """
        ids = check_batch(tokens, self.config.vocab_size)
        lengths = [len(part) for part in tokens]
        flat = None if parents is None else [parent for tree in parents for parent in tree]
        depths = lengths if parents is None else [_depth(tree) for tree in parents]
        self._check_length(cache, seq_ids, depths)
        with self._machines.borrow() as run, cache.forward(seq_ids, lengths, flat):
            x = run["embed"](tvm.runtime.tensor(ids), self.parameters)
            logits = run["decode"](x, cache, self.parameters)
        return np.split(logits.numpy(), np.cumsum(lengths)[:-1])

    def _check_length(self, cache: KVCache, seq_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Raise a ValueError if a step exceeds the length up to which a dynamic RoPE is valid."""
        limit = self.config.longest_text
        if limit is None:
            return
        for seq_id, length in zip(seq_ids, lengths, strict=False):
            total = cache.sequence_length(seq_id) + length
            if total > limit:
                raise ValueError(
                    f"sequence {seq_id} would have {total} positions; a dynamic rotation holds for "
                    f"{limit} (max_position_embeddings), and beyond them all K in the cache would "
                    "have to be rotated anew"
                )


def _depth(parents: Sequence[int]) -> int:
    """Return the number of nodes on the longest path of a token tree."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if 0 <= parent < len(depths) else 0))
    return max(depths, default=0)


def read_model(model: str | Path | None, dtype: str | None) -> tuple[ModelSource, DecoderConfig]:
    """Return the source of a model and its configuration, after a check of the dtype to run in.

    Raises
    ------
    FileNotFoundError, ValueError
        As `DecoderModel.from_pretrained`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    source = open_model(model)
    return source, source.config()


def check_cache(source: ModelSource, config: DecoderConfig, options: BuildOptions) -> None:
    """Raise a ValueError early if the cache of a model has no kernels."""
    try:
        cache_config(config, options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"no cache for the model in {source.path}: {error}") from None
