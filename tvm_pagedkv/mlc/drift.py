# SPDX-License-Identifier: Apache-2.0
"""Names that mlc-llm's sources use and the installed apache-tvm does not have.

mlc-llm follows TVM's main branch, which has renamed some classes before and after the release this
package needs. Each name is added only where it is missing, so that an mlc-llm and a TVM that fit
each other are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax
from tvm.relax.frontend.nn import Tensor, op

from .modules import find
from .patches import Overlay, Patches


def bridge(patches: Patches) -> None:
    """Let mlc-llm's sources run with the installed apache-tvm and transformers.

    Raises
    ------
    ImportError
        Where mlc-llm is missing or has no such modules.
    """
    add_missing_tvm_names(patches)  # which importing mlc-llm needs
    skip_slow_schedules(patches, find("mlc_llm.compiler_pass.pipeline", "dl"))
    read_newer_configs(patches, find("mlc_llm.support.config", "ConfigBase").ConfigBase)
    take_numbers_behind_outputs(patches)


def add_missing_tvm_names(patches: Patches) -> None:
    """Give apache-tvm the names under which mlc-llm's sources look for its classes."""
    if hasattr(tvm.ir, "StringImm"):  # since 0.27, which removed it from Relax
        patches.set_missing(relax, "StringImm", tvm.ir.StringImm)
    for name in ("SBlock", "SBlockRealize"):  # which passes for quantized weights look for
        if hasattr(tvm.s_tir, name):  # since 0.27, which moved them there
            patches.set_missing(tvm.tirx, name, getattr(tvm.s_tir, name))
    patches.set_missing(
        relax,
        "Constant",
        _renamed(
            "Constant",
            lambda value: (
                isinstance(value, tvm.ir.GenericConst)
                and isinstance(value.value, tvm.runtime.Tensor)
            ),
            lambda data, *_: relax.const(data),
        ),
    )
    patches.set_missing(
        relax,
        "DataTypeImm",
        _renamed(
            "DataTypeImm",
            lambda value: (
                isinstance(value, tvm.ir.GenericConst) and isinstance(value.value, tvm.DataType)
            ),
            lambda dtype, *_: tvm.ir.GenericConst(tvm.DataType(str(dtype)), relax.AnyType()),
        ),
    )
    if hasattr(tvm.ir, "GenericConst"):
        patches.set_missing(tvm.ir.GenericConst, "data", property(lambda constant: constant.value))
    patches.set_missing(relax.Var, "name_hint", property(lambda variable: variable.name))


def _renamed(name: str, is_one: Callable[[Any], bool], make: Callable[..., Any]) -> type:
    """A class of another name for `isinstance` and for making values, without instances."""

    class Meta(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return is_one(value)

        def __call__(cls, *args: Any) -> Any:
            return make(*args)

    return Meta(name, (), {"__module__": __name__})


def skip_slow_schedules(patches: Patches, pipeline: Any) -> None:
    """Keep products of a matrix and a vector away from TVM's schedule for CPUs.

    That schedule loads 64 or 128 rows of the matrix as one vector, column by column, and unrolls
    the columns. LLVM takes minutes for each of these functions, as the vector has no instruction.

    Parameters
    ----------
    pipeline : module
        ``mlc_llm.compiler_pass.pipeline``, whose name ``dl`` is TVM's schedule library.
    """
    dl = pipeline.dl

    class GEMV(dl.cpu.GEMV):  # type: ignore[name-defined]
        def apply(self, func: Any, target: Any, tunable: bool) -> None:
            return None

    patches.set(pipeline, "dl", Overlay(dl, cpu=Overlay(dl.cpu, GEMV=GEMV)))


def take_numbers_behind_outputs(patches: Patches) -> None:
    """Let `tensor_ir_op` call kernels of mlc-llm that take numbers behind their outputs.

    Kernels that take them where their call has them, as this apache-tvm wants it, stay as they are.
    """
    original = op.tensor_ir_op

    def tensor_ir_op(func: tvm.tirx.PrimFunc, name_hint: str, args: Any, out: Any) -> Any:
        return original(numbers_before_outputs(func, args), name_hint, args, out)

    patches.set(op, "tensor_ir_op", tensor_ir_op)


def numbers_before_outputs(func: tvm.tirx.PrimFunc, args: Any) -> tvm.tirx.PrimFunc:
    """A kernel whose parameters are in the order of the arguments of its call, then the outputs."""
    given = list(args) if isinstance(args, (tuple, list)) else [args]
    if any(isinstance(each, relax.ShapeExpr) for each in given):
        return func
    is_number = [not isinstance(each, Tensor) for each in given]
    params, count = list(func.params), sum(is_number)
    if [isinstance(param.ty, tvm.ir.PrimType) for param in params[: len(given)]] == is_number:
        return func
    numbers, others = iter(params[-count:]), iter(params[:-count])
    ordered = [next(numbers if n else others) for n in is_number]
    return tvm.tirx.PrimFunc([*ordered, *others], func.body, func.ret_type, func.attrs)


def read_newer_configs(patches: Patches, config_base: Any) -> None:
    """Let mlc-llm read the ``rope_parameters`` of transformers 5, and YaRN as TVM wants it.

    Parameters
    ----------
    config_base : type
        ``mlc_llm.support.config.ConfigBase``, whose ``from_dict`` makes every model configuration.
    """
    original = config_base.from_dict.__func__

    def from_dict(cls: Any, source: dict[str, Any]) -> Any:
        return original(cls, with_older_rope_fields(source, set(cls.__dataclass_fields__)))

    patches.set(config_base, "from_dict", classmethod(from_dict))


def with_older_rope_fields(source: dict[str, Any], fields: set[str]) -> dict[str, Any]:
    """A model's configuration with ``rope_theta`` and ``rope_scaling`` as mlc-llm reads them.

    Parameters
    ----------
    source : dict
        The content of a config.json.
    fields : set of str
        What the configuration class knows; one that knows ``rope_parameters`` reads them itself.

    Returns
    -------
    dict
        A copy with ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` from
        ``rope_parameters``, where those are there and these are not.
    """
    source = dict(source)
    parameters = source.get("rope_parameters")
    if isinstance(parameters, dict) and "rope_parameters" not in fields:
        # Gemma 3 has parameters for each kind of layer; mlc-llm knows those of full attention.
        parameters = dict(parameters.get("full_attention", parameters))
        for key, older in (("rope_theta",) * 2, ("partial_rotary_factor", "rotary_pct")):
            if key in parameters:
                value = parameters.pop(key)
                source.setdefault(key, value)
                source.setdefault(older, value)
        rope_type = parameters.get("rope_type", "default")
        if rope_type != "default" and source.get("rope_scaling") is None:
            source["rope_scaling"] = parameters | {"type": rope_type}
        if "original_max_position_embeddings" in parameters:
            source.setdefault(
                "original_max_position_embeddings", parameters["original_max_position_embeddings"]
            )
    scaling = source.get("rope_scaling")
    if isinstance(scaling, dict) and (scaling.get("rope_type") or scaling.get("type")) == "yarn":
        theta = float(source.get("rope_theta", 10000.0))
        source["rope_scaling"] = {
            "rope_type": "yarn",
            "beta_fast": 32,
            "beta_slow": 1,
            "inv_theta_log_scale": 1.0 / (2.0 * math.log(theta)),
            **scaling,
        }
    return source
