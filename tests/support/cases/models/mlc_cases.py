# SPDX-License-Identifier: Apache-2.0
"""mlc-llm's stand-in as an importable package, and a model that it compiles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.frontend.nn import spec
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode
from tvm.relax.pipeline import PIPELINE_MAP
from tvm_ffi import Shape

from ....relax.test_frontend import (
    CAPACITIES,
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_QO_HEADS,
    AttentionOnly,
    _rows,
)
from ...harness.fast_compilation import MODEL_TARGET, path_of_children

STANDIN = Path(__file__).parents[2] / "emulators" / "mlc_standin"


@pytest.fixture
def mlc_llm(tmp_path, monkeypatch) -> Iterator[Path]:
    """The stand-in, importable here and in child processes; its home folder."""
    import tvm_pagedkv.mlc

    monkeypatch.syspath_prepend(str(STANDIN))
    monkeypatch.setenv("PYTHONPATH", path_of_children())
    monkeypatch.setenv("MLC_LLM_HOME", str(tmp_path / "mlc"))
    (tmp_path / "mlc" / "model_lib").mkdir(parents=True)
    yield tmp_path / "mlc"
    tvm_pagedkv.mlc.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "mlc_llm"]:
        del sys.modules[name]
    PIPELINE_MAP.pop("mlc_llm_standin", None)  # which another import would register again


class Model(AttentionOnly):
    """Attention of two layers, with the call for a cache that mlc-llm's models make."""

    def __init__(self, kinds: str | list[str], scaling: dict, factors: list[float] | None):
        super().__init__(None, {}, kinds)
        self.scaling, self.factors = scaling, factors

    def create_paged_kv_cache(
        self,
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
        support_sliding_window: tirx.Var,
    ):
        from mlc_llm.nn.kv_cache import create_generic

        return create_generic(
            self.kinds,
            [
                max_batch_size,
                max_total_seq_len,
                prefill_chunk_size,
                page_size,
                support_sliding_window,
            ],
            NUM_LAYERS,
            (NUM_QO_HEADS, NUM_KV_HEADS),
            (HEAD_DIM, HEAD_DIM),
            (RopeMode.NORMAL, 10000, self.scaling, self.factors, HEAD_DIM),
            "float32",
        )


def exported(kinds="mha", scaling=None, factors=None) -> tvm.IRModule:
    """The model as mlc-llm's pipeline gets it; needs what `install` adds to apache-tvm."""
    plain = {"param_mode": "none", "effect_mode": "none"}
    cache = spec.Object(object_type=PagedKVCache)
    functions = {
        "create_paged_kv_cache": {name: int for name in CAPACITIES} | {"$": plain},
        "fused": {"qkv": _rows(NUM_QO_HEADS + 2 * NUM_KV_HEADS), "cache": cache, "$": plain},
    }
    return Model(kinds, scaling or {}, factors).export_tvm(functions, allow_extern=True)[0]


def compiled(model_type="plain", config=None, flashinfer=False, **model):
    """Compile by the stand-in; returns the machine and the metadata that the pass was given."""
    from mlc_llm.interface import compile as interface

    arguments = interface.CompileArgs(
        interface.ModelType(model_type),
        exported(**model),
        MODEL_TARGET,
        flashinfer,
    )
    executable = interface.compile(arguments, config)
    return relax.VirtualMachine(executable, tvm.cpu()), arguments.metadata


def created(machine: relax.VirtualMachine):
    """A cache of a compiled model."""
    return machine["create_tir_paged_kv_cache"](*(Shape([n]) for n in CAPACITIES.values()))
