# SPDX-License-Identifier: Apache-2.0
"""Compile an exported model to an executable."""

import dataclasses
from typing import Any

from tvm import relax

from .. import compiler_pass  # noqa: F401
from ..compiler_pass import pipeline  # noqa: F401  (registers itself)


@dataclasses.dataclass
class ModelType:
    name: str


@dataclasses.dataclass
class CompileArgs:
    model: ModelType
    module: Any
    target: Any
    flashinfer: bool = False
    metadata: dict = dataclasses.field(default_factory=dict)


def _compile(args, model_config):
    args.metadata["model_type"] = args.model.name
    passes = relax.get_pipeline(
        "mlc_llm_standin",
        target=args.target,
        flashinfer=args.flashinfer,
        metadata=args.metadata,
    )
    with args.target:
        return relax.build(args.module, target=args.target, relax_pipeline=passes)


def compile(args, model_config):
    return _compile(args, model_config)
