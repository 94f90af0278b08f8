# SPDX-License-Identifier: Apache-2.0
"""Compile a checkpoint by mlc-llm's own compiler and load its weights by mlc-llm's own loader."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm

import tvm_pagedkv.mlc
from tvm_pagedkv.mlc.drift import bridge
from tvm_pagedkv.mlc.patches import Patches

from .families import Family


@contextmanager
def stock() -> Iterator[None]:
    """mlc-llm with TVM's own cache, and only what it takes to run with this apache-tvm."""
    patches = Patches()
    try:
        bridge(patches)
        tvm_pagedkv.use_stock_runtime()
        yield
    finally:
        tvm_pagedkv.use_pagedkv_runtime()
        patches.undo()


@contextmanager
def ours() -> Iterator[None]:
    """mlc-llm with our cache."""
    tvm_pagedkv.mlc.install()
    try:
        yield
    finally:
        tvm_pagedkv.mlc.uninstall()


def compile_model(
    mlc_name: str,
    config: dict[str, Any],
    output: Path,
    quantization: str = "q0f32",
    **overrides: Any,
) -> float:
    """Compile a model of mlc-llm into a shared library; returns the seconds it took."""
    from mlc_llm.interface.compile import compile
    from mlc_llm.interface.compiler_flags import ModelConfigOverride, OptimizationFlags
    from mlc_llm.model import MODELS
    from mlc_llm.quantization import QUANTIZATION

    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("mlc_llm"):
            logging.getLogger(name).setLevel(logging.WARNING)
    # Model and host in one target: this machine.
    target = tvm.target.Target.from_device("cpu")
    start = time.perf_counter()
    compile(
        config=copy.deepcopy(config),
        quantization=QUANTIZATION[quantization],
        model_type=MODELS[mlc_name],
        target=target,
        opt=OptimizationFlags(),
        build_func=_build,
        system_lib_prefix="",
        output=output,
        overrides=ModelConfigOverride(**overrides),
    )
    return time.perf_counter() - start


def _build(module: tvm.IRModule, arguments: Any, pipeline: Any) -> None:
    executable = tvm.relax.build(module, target=arguments.target, relax_pipeline=pipeline)
    executable.export_library(str(arguments.output))


def load_weights(family: Family, config: dict[str, Any], file: Path) -> list[tvm.runtime.Tensor]:
    """The parameters in the order of the compiled model's packed argument."""
    from mlc_llm.loader import HuggingFaceLoader
    from mlc_llm.model import MODELS
    from mlc_llm.quantization import QUANTIZATION

    model_type, quantization = MODELS[family.mlc_name], QUANTIZATION[family.quantization]
    model_config = model_type.config.from_dict(copy.deepcopy(config))
    model, codes = model_type.quantize[quantization.kind](model_config, quantization)
    _, named, _ = model.export_tvm(spec=model.get_default_spec(), allow_extern=True)
    mapping = model_type.source["huggingface-safetensor"](model_config, quantization)
    is_quantized = quantization.kind != "no-quant"
    loader = HuggingFaceLoader(
        path=file, extern_param_map=mapping, quantize_param_map=codes if is_quantized else None
    )
    with tvm.target.Target.from_device("cpu"):  # for which codes are computed
        weights = dict(loader.load(device=tvm.cpu()))
    return [weights[name] for name, _ in named]
