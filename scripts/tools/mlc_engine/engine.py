# SPDX-License-Identifier: Apache-2.0
"""mlc-llm's C++ engine, in steps that the caller takes, with token ids in and out."""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import tvm
import tvm_ffi

from tvm_pagedkv.relax.own_creation import CREATE_IN_MODEL
from tvm_pagedkv.relax.stock_creation import CREATE_POSITIONALLY

MAX_BATCH, MAX_TOKENS, MAX_CHUNK, PAGE_SIZE = 16, 16384, 64, 16


class Engine:
    """One engine with its model, and the model of its drafts.

    Parameters
    ----------
    models : list of (Path, Path)
        Folder and library of the model and, for drafts, of a second one.
    settings : Any
        Fields of mlc-llm's ``EngineConfig``.

    Attributes
    ----------
    caches : list
        The cache of each model, which the engine itself shows nobody.
    """

    def __init__(self, models: list[tuple[Path, Path]], **settings: Any):
        from mlc_llm.serve.config import EngineConfig
        from mlc_llm.serve.sync_engine import SyncMLCEngine

        (folder, library), *others = models
        config = EngineConfig(
            additional_models=[(str(each), str(its)) for each, its in others],
            max_num_sequence=MAX_BATCH,
            max_total_sequence_length=MAX_TOKENS,
            prefill_chunk_size=MAX_CHUNK,
            verbose=False,
            **settings,
        )
        with _caches() as self.caches:
            self._engine = SyncMLCEngine(
                str(folder),
                tvm.cpu(),
                model_lib=str(library),
                mode="server",
                engine_config=config,
                request_stream_callback=self._receive,
            )
        self._ids = itertools.count()
        self._tokens: dict[str, list[list[int]]] = {}
        self._unfinished: dict[str, int] = {}
        self._extra: dict[str, dict[str, Any]] = {}

    def start(self, prompt: list[int], count: int, n: int = 1, name: str = "", **debug: Any) -> str:
        """Add a request of the likeliest tokens and return its name.

        Parameters
        ----------
        prompt : list of int
        count : int
            Tokens to generate.
        n : int
            Continuations.
        name : str
            Of the request, if it goes on with one.
        debug : Any
            Fields of mlc-llm's ``DebugConfig``.
        """
        from mlc_llm.protocol.debug_protocol import DebugConfig
        from mlc_llm.protocol.generation_config import GenerationConfig
        from mlc_llm.serve.data import TokenData

        name = name or str(next(self._ids))
        settings = GenerationConfig(
            n=n,
            temperature=0.0,
            top_p=1.0,
            max_tokens=count,
            debug_config=DebugConfig(ignore_eos=True, **debug),
        )
        self._tokens[name] = [[] for _ in range(n)]
        self._unfinished[name] = n
        request = self._engine.create_request(name, TokenData(prompt), settings)
        self._engine.add_request(request)
        return name

    def finish(self, name: str) -> list[list[int]]:
        """Take steps until a request ends, and return the tokens of its continuations."""
        while self._unfinished[name] > 0:
            self._engine.step()
        return self._tokens[name]

    def count(self, name: str) -> int:
        """How many tokens a request has, in its shortest continuation."""
        return min(map(len, self._tokens[name]))

    def wait_for_extra(self, name: str) -> dict[str, Any]:
        """Take steps until a request reports something besides tokens, and return that."""
        while name not in self._extra:
            self._engine.step()
        return self._extra.pop(name)

    def step(self) -> None:
        self._engine.step()

    def abort(self, name: str) -> None:
        self._engine.abort_request(name)

    def generate(self, prompts: list[list[int]], count: int, n: int = 1) -> list[list[list[int]]]:
        """The continuations of prompts that run together."""
        names = [self.start(prompt, count, n) for prompt in prompts]
        return [self.finish(name) for name in names]

    def metrics(self) -> dict[str, Any]:
        """What the engine counts."""
        return json.loads(self._engine._ffi["json_metrics"]())

    def _receive(self, outputs: list) -> None:
        for output in outputs:
            name, streams = output.unpack()
            for tokens, stream in zip(self._tokens[name], streams, strict=False):
                tokens += stream.delta_token_ids
                self._unfinished[name] -= stream.finish_reason is not None
                if stream.request_final_usage_json_str is not None:
                    usage = json.loads(stream.request_final_usage_json_str)
                    self._extra[name] = usage.get("extra") or {}


@contextmanager
def _caches() -> Iterator[list]:
    """Collect the caches that models create, by either constructor."""
    created: list = []
    names = CREATE_IN_MODEL, CREATE_POSITIONALLY
    creators = {name: tvm_ffi.get_global_func(name) for name in names}

    def remember(create: Callable, *arguments: Any) -> Any:
        created.append(create(*arguments))
        return created[-1]

    for name, create in creators.items():
        tvm_ffi.register_global_func(name, functools.partial(remember, create), override=True)
    try:
        yield created
    finally:
        for name, create in creators.items():
            tvm_ffi.register_global_func(name, create, override=True)


def load_library() -> None:
    """Load mlc-llm's C++ library, with what it calls in this process."""
    tvm_ffi.register_global_func("mlc_trial.tokenizer", _tokenizer, override=True)
    # A model for prefill and decode on different machines starts NVSHMEM; here nothing needs it.
    os.environ["MLC_NVSHMEM_INIT_CONFIG_JSON_STR"] = "{}"
    name = "runtime.disco.nvshmem.init_nvshmem_wrapper"
    tvm_ffi.register_global_func(name, lambda _: None, override=True)
    import mlc_llm.base  # noqa: F401  (loads it)


def _tokenizer(text: str) -> dict[str, Any]:
    """The functions of a tokenizer that tokenizer.cc calls."""
    tokenizer = tokenizers.Tokenizer.from_str(text)

    def token_to_id(token: str) -> int:
        found = tokenizer.token_to_id(token)
        return -1 if found is None else found

    return {
        "encode": lambda text: tvm_ffi.Shape(tokenizer.encode(bytes(text).decode()).ids),
        "decode": lambda ids: tokenizer.decode([*ids]),
        "vocab_size": tokenizer.get_vocab_size,
        "id_to_token": lambda id: tokenizer.id_to_token(id) or "",
        "token_to_id": token_to_id,
    }
