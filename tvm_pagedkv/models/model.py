# SPDX-License-Identifier: Apache-2.0
"""`LlamaModel`: a Hugging Face directory becomes compiled code, weights and a tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.target import Target

import tir_kernels

from ..build import resolve_target
from ..cache import KVCache
from ..config import DTYPES, KVCacheConfig, LayerSpec
from ..disk_cache import code_versions, library_file, load_library
from . import llama
from .checkpoint import Checkpoint
from .config import LlamaConfig
from .linear import PackedMatrix
from .tokens import check_batch, check_tokens

TINY = Path(__file__).parent / "tiny"
# The files that decide the code of a model.
_SOURCES = (
    Path(__file__).parent,
    Path(tir_kernels.__file__).parent,
    *(
        Path(__file__).parents[1] / f"{name}.py"
        for name in (
            *("alibi", "build", "config", "frontend", "frontend_methods"),
            *("lowering", "model_kernels", "rope_config"),
        )
    ),
)


class LlamaModel:
    """A decoder ready to run on the CPU.

    Parameters
    ----------
    config : LlamaConfig
    options : BuildOptions
    library : Path
        The compiled functions of `llama.Llama`.
    parameters : list of tvm tensors
        Weights, in the order of the executable's functions.
    tokenizer : tokenizers.Tokenizer, optional
    """

    def __init__(self, config, options, library, parameters, tokenizer=None):
        self.config, self.options, self.tokenizer = config, options, tokenizer
        self.library, self.parameters = library, parameters
        self._vm = relax.VirtualMachine(load_library(library), tvm.cpu())
        names = ("embed", "prefill", "decode", "create_kv_cache")
        self._embed, self._prefill, self._decode, self._create = (self._vm[name] for name in names)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path | None = None,
        dtype: str | None = None,
        *,
        page_size: int = 16,
        sliding_window: bool = False,
        target: Target | str | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> LlamaModel:
        """Load a Hugging Face directory; compiled code is kept on disk for the next time.

        Parameters
        ----------
        directory : path, optional
            Holds config.json, ``*.safetensors`` and tokenizer.json; None: the small model that
            comes with the package.
        dtype : {"float32", "float16", "bfloat16"}, optional
            Of weights, activations and pages, whatever the files hold; None: float32.
        page_size : int
            Slots of a page of the caches that the model makes.
        sliding_window : bool
            Whether sequences of these caches may be given a sliding window; K and Q are then
            rotated within attention.
        target : optional
            None: this machine.
        progress : callable, optional
            Called with a line of text when something takes time.

        Raises
        ------
        FileNotFoundError
            Where the directory or one of its files is missing.
        ValueError
            Where the architecture is not known, or a tensor is missing or has the wrong shape.
        """
        directory = TINY if directory is None else Path(directory)
        dtype = "float32" if dtype is None else dtype
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        progress = progress or (lambda line: None)
        config = LlamaConfig.from_directory(directory)
        check_attention(directory, config, dtype, page_size, sliding_window)
        options = llama.BuildOptions(dtype, page_size, resolve_target(target), sliding_window)
        tokenizer = load_tokenizer(directory)
        parameters = load_parameters(config, options, Checkpoint(directory))
        library = executable_file(config, options, progress)
        return cls(config, options, library, parameters, tokenizer)

    # --- steps ----------------------------------------------------------------------------------

    def create_cache(
        self,
        max_num_sequences: int,
        max_total_tokens: int,
        prefill_chunk_size: int = 512,
        enable_kv_transfer: bool = False,
    ) -> KVCache:
        """An empty cache for this model."""
        sizes = (max_num_sequences, max_total_tokens, prefill_chunk_size, int(enable_kv_transfer))
        return self._create(*(tvm_ffi.Shape([size]) for size in sizes))

    def prefill(
        self, cache: KVCache, seq_ids: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """Append ``tokens[i]`` to sequence ``seq_ids[i]``; logits of the last row of each.

        Returns
        -------
        logits : float32 [len(seq_ids), vocab_size]

        Raises
        ------
        TypeError
            For tokens that are no integers.
        ValueError
            For a token that the vocabulary does not have; the cache stays as it was.
        """
        ids = check_batch(tokens, self.config.vocab_size)
        lengths = [len(part) for part in tokens]
        rows = np.cumsum(lengths, dtype="int32") - 1
        with cache.forward(seq_ids, lengths):
            x = self._embed(tvm.runtime.tensor(ids), self.parameters)
            logits = self._prefill(x, tvm.runtime.tensor(rows), cache, self.parameters)
        return logits.numpy()

    def decode(self, cache: KVCache, seq_ids: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Append one token to each sequence; logits float32 [len(seq_ids), vocab_size].

        Raises
        ------
        TypeError, ValueError
            As `prefill`.
        """
        ids = check_tokens("tokens", tokens, self.config.vocab_size)
        with cache.forward(seq_ids, [1] * len(ids)):
            x = self._embed(tvm.runtime.tensor(ids), self.parameters)
            logits = self._decode(x, cache, self.parameters)
        return logits.numpy()

    def logits(
        self,
        cache: KVCache,
        seq_ids: Sequence[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> list[np.ndarray]:
        """As `prefill`, with the logits of every row: float32 [len(tokens[i]), vocab_size] each.

        Parameters
        ----------
        parents : optional
            Of each token, where they are nodes of token trees; to be followed by
            `KVCache.commit_tree`.
        """
        ids = check_batch(tokens, self.config.vocab_size)
        lengths = [len(part) for part in tokens]
        flat = None if parents is None else [parent for tree in parents for parent in tree]
        with cache.forward(seq_ids, lengths, flat):
            x = self._embed(tvm.runtime.tensor(ids), self.parameters)
            logits = self._decode(x, cache, self.parameters)
        return np.split(logits.numpy(), np.cumsum(lengths)[:-1])


def check_attention(
    directory: Path, config: LlamaConfig, dtype: str, page_size: int, sliding_window: bool
) -> None:
    """Refuse heads, page sizes and windows that have no kernels, before anything takes time."""
    if sliding_window and config.rope.scaling_dict.get("rope_type") == "longrope":
        raise ValueError(
            f"the model in {directory} has a longrope rotation, whose factors change with the "
            "length of a text; it cannot run with a sliding window"
        )
    try:
        KVCacheConfig(
            num_layers=config.num_layers,
            num_qo_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            qk_head_dim=config.head_dim,
            dtype=dtype,
            page_size=page_size,
            rope=config.rope,
            layers=[LayerSpec(config.layer_kind, config.sliding_window)] * config.num_layers,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"no cache for the model in {directory}: {error}") from None


def load_parameters(
    config: LlamaConfig, options: llama.BuildOptions, checkpoint: Checkpoint, shard: int = 0
) -> list[tvm.runtime.Tensor]:
    """Weights of a worker in the order of the compiled functions, one read at a time."""
    model = llama.Llama(config, options)
    sources = dict(llama.weights(config, options.layers_of(config)))
    dtype = np.dtype(options.dtype)
    loaded = []
    for name, _ in model.named_parameters():
        source = sources[name]
        parts = [
            source.share(checkpoint.read(theirs, shape), shard, options.num_shards)
            for theirs, shape in source.parts
        ]
        array = np.concatenate(parts).astype(dtype)
        if source.is_matrix:
            array = PackedMatrix(*array.shape, options.dtype, options.vector).pack(array)
        loaded.append(tvm.runtime.tensor(array))
    return loaded


def load_tokenizer(directory: Path):
    """The tokenizer of a Hugging Face directory."""
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{directory} has no tokenizer.json")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is not a readable tokenizer: {error}") from None


def executable_file(
    config: LlamaConfig, options: llama.BuildOptions, progress: Callable[[str], None]
) -> Path:
    """A library with the compiled functions of the model, or of one of its stages."""

    def compile_model():
        start = time.perf_counter()
        num_layers = len(options.layers_of(config))
        progress(f"compiling the model ({num_layers} layers, {options.dtype})")
        built = tvm.compile(llama.build_module(config, options), options.target)
        progress(f"compiled in {time.perf_counter() - start:.1f} s")
        return built

    versions = code_versions(*_SOURCES)
    return library_file([repr(config), repr(options), *versions], compile_model)
