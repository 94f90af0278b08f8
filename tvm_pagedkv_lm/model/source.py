# SPDX-License-Identifier: Apache-2.0
"""Where a model comes from: its configuration, weights, tokenizer and chat template."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..blocks.mlp import Mlp
from ..blocks.moe import MixtureOfExperts
from ..config.decoder_config import DecoderConfig
from ..config.json_files import check_content, read_json
from ..config.part import LayerPart
from ..families.pictures import as_stored
from ..families.registry import config_from_directory
from ..text import added_tokens, tiktoken
from ..text.added_tokens import add_named_tokens, special_tokens, token_fields
from ..text.chat import ChatTemplate
from ..text.llama_tokenizer import set_prefix_space
from ..text.sampling_defaults import sampling_defaults
from ..weights.checkpoint import Checkpoint
from ..weights.content_digest import content_digest
from ..weights.tensors import Tensors
from ..weights.weight_files import tensor_begins, weight_files
from .gguf_model import GgufModel
from .hub import find_model
from .included import NAMES, TINY

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# The files besides the weights that decide what tokens a text has.
_TEXT_FILES = ("tokenizer.json", tiktoken.FILE, *added_tokens.FILES, "chat_template.jinja")


class ModelSource(Protocol):
    """A directory or a file with all that a model needs."""

    @property
    def path(self) -> Path:
        """Where it is, for errors."""

    def config(self) -> DecoderConfig:
        """Return the configuration."""

    def tensors(self) -> Tensors:
        """Return the reader of the weights."""

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""

    def end_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids of tokens that end a text, besides those of the configuration."""

    def chat_template(self) -> ChatTemplate | None:
        """Return the chat template; None if there is none."""

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that the makers recommend, as `sampling_defaults`."""

    def fingerprint(self) -> str:
        """Return a name for all that a text depends on: weights, tokenizer and chat template."""

    def content_digest(self) -> str:
        """Return a name for the weights, which copies on other machines have as well."""


class HuggingFaceModel:
    """A Hugging Face directory as the source of a model.

    Parameters
    ----------
    path : path
        A folder with config.json, ``*.safetensors`` and tokenizer.json, or Kimi's tiktoken.model.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def config(self) -> DecoderConfig:
        """Return the configuration."""
        config = config_from_directory(self.path)
        if not weight_files(self.path):
            return config
        stored = self.tensors().names()
        config = as_stored(config, stored)
        if f"{config.names.lm_head}.weight" in stored:
            # Files of fine-tuned models may still have the ``tie_word_embeddings`` of their base.
            config = replace(config, tied_embeddings=False)
        return _with_layout(config, stored)

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(self.path)

    def tensors(self) -> Checkpoint:
        """Return the reader of the weights."""
        return self._checkpoint

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        from tokenizers import Tokenizer

        file = self.path / "tokenizer.json"
        if not file.is_file() and (self.path / tiktoken.FILE).is_file():
            return tiktoken.tiktoken_tokenizer(self.path)
        if not file.is_file():
            raise FileNotFoundError(_without_tokenizer(self.path))
        check_content(file)
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file} is not a readable tokenizer: {error}") from None
        # Files keep how texts of the training were cut and padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = self.path / "config.json"
        fields = read_json(config) if config.is_file() else {}
        set_prefix_space(tokenizer, token_fields(self.path), fields.get("model_type"))
        add_named_tokens(tokenizer, self.path)
        return tokenizer

    def end_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the id of the ``eos_token``, which config.json of a fine-tune may not name."""
        token = special_tokens(token_fields(self.path)).get("eos_token")
        found = None if token is None else tokenizer.token_to_id(token)
        return () if found is None else (found,)

    def chat_template(self) -> ChatTemplate | None:
        """Return the chat template; None if there is none."""
        return ChatTemplate.from_directory(self.path)

    def sampling(self) -> dict[str, Any]:
        """Return what generation_config.json says about sampling."""
        file = self.path / "generation_config.json"
        return sampling_defaults(read_json(file), str(file)) if file.is_file() else {}

    def fingerprint(self) -> str:
        """Return a name for all that a text depends on: weights, tokenizer and chat template.

        It depends on their content alone, of which the weights are sampled.
        """
        digest = hashlib.sha256(self.content_digest().encode())
        for name in _TEXT_FILES:
            file = self.path / name
            digest.update(file.read_bytes() if file.is_file() else b"")
            digest.update(b"\0")
        return digest.hexdigest()

    def content_digest(self) -> str:
        """Return a name for the weights, which copies on other machines have as well."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        weights = [self.path / name for name in weight_files(self.path)]
        config = {self.path / "config.json": ()}
        return content_digest(config | {file: tensor_begins(file) for file in weights})


def _without_tokenizer(directory: Path) -> str:
    """Return a sentence that says what a directory has in place of tokenizer.json."""
    others = ("tokenizer.model", "tekken.json", "vocab.json", "spiece.model")
    found = [name for name in others if (directory / name).is_file()]
    if not found:
        return f"{directory} has no tokenizer.json"
    return (
        f"{directory} has no tokenizer.json, only {', '.join(found)}; transformers converts it: "
        f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
    )


def _with_layout(config: DecoderConfig, stored: Sequence[str]) -> DecoderConfig:
    """Return a configuration with experts and the layout of their tensors in a checkpoint.

    Of some families there are checkpoints with a tensor for each expert, and others in which one
    tensor has the matrices of all. In Kimi Linear's by transformers, layers without experts have
    their MLP in the part that others call the experts'.
    """
    found, dense = config.find(MixtureOfExperts), config.find(Mlp)
    if found is None or found.experts.names.is_stacked:
        return config
    names = found.experts.names
    mlp_block = names.block
    if dense is not None and any(f".{dense.names.block}." in name for name in stored):
        mlp_block = dense.names.block
    fused = f".{names.block}.{names.experts}.gate_up_proj"
    if any(name.endswith(fused) for name in stored):
        names = replace(names, fused_gate_up="gate_up_proj", is_stacked=True)

    def change(part: LayerPart) -> LayerPart:
        if isinstance(part, MixtureOfExperts):
            return replace(part, experts=replace(part.experts, names=names))
        if isinstance(part, Mlp):
            return replace(part, names=replace(part.names, block=mlp_block))
        return part

    return config.map(change)


def open_model(model: str | Path | None) -> ModelSource:
    """Return the source of a model.

    Parameters
    ----------
    model : path, optional
        A Hugging Face directory, a GGUF file, or a directory with a single GGUF file, whose
        ``generation_config.json`` counts if there is one; or a name, as `find_model` takes it.
        None: the small model in this package.

    Raises
    ------
    FileNotFoundError
        If there is nothing at this path.
    ValueError
        If it is a file of another kind, or a directory with several GGUF files.
    """
    path = TINY if model is None else find_model(model)
    if not path.exists():
        raise FileNotFoundError(
            f"there is no file or folder {path}; a model is a Hugging Face directory, a GGUF file, "
            f"{', '.join(NAMES)}, or an id of the Hugging Face Hub such as org/name"
        )
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(
                f"{path} is a file; expected a Hugging Face directory, or a .gguf file"
            )
        return GgufModel(path)
    files = [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{path} has several GGUF files; name one of {names}")
    if not files:
        return HuggingFaceModel(path)
    generation = path / "generation_config.json"
    return GgufModel(files[0], read_json(generation) if generation.is_file() else None)


def load_tokenizer(source: ModelSource, config: DecoderConfig) -> tuple[Tokenizer, DecoderConfig]:
    """Return the tokenizer of a model, and the configuration with all tokens that end a text.

    Added tokens may exceed the model's vocabulary, such as image tokens of text models. A prompt
    with such a token is refused later.
    """
    tokenizer = source.tokenizer()
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    if size > config.vocab_size:
        raise ValueError(
            f"{source.path}: the tokenizer has {size} tokens, and the model's embeddings have "
            f"{config.vocab_size} rows (vocab_size); the tokenizer is that of another model"
        )
    ends = (*config.eos_token_ids, *source.end_tokens(tokenizer))
    return tokenizer, replace(config, eos_token_ids=tuple(dict.fromkeys(ends)))


def fingerprint(model: str | Path | None = None) -> str:
    """Return a name for a model, to tell whether K and V of an earlier process are its own.

    Parameters
    ----------
    model : path, optional
        As `open_model` takes it.

    Returns
    -------
    str
        64 hexadecimal digits.

    Raises
    ------
    OSError
        If a file cannot be read.
    """
    return open_model(model).fingerprint()
