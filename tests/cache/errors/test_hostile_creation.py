# SPDX-License-Identifier: Apache-2.0
"""Caches cannot be made from wrong arguments, nor from sizes that no machine has."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

from tvm_pagedkv.relax.own_creation import CREATE_IN_MODEL

from ...support.emulators.python_kernels import (
    KERNELS,
    LAYER,
    MLA_KERNELS,
    MLA_LAYER,
    make_cache,
    make_config,
)
from ...support.harness.in_child import failures
from ...support.worlds.hostile_values import Kind, wrong_types

ERRORS = (ValueError, KeyError, IndexError, TypeError, MemoryError)

BELOW_ONE = {"zero": 0, "negative": -1, "low": -(2**63), "high": 2**63 - 1, "wide": 2**32}
NO_INT = {"text": "4", "half": 4.5, "array": [4], "map": {}, "cache": make_cache}
NO_SCALE = {
    "nan": float("nan"), "inf": float("inf"), "minus_inf": -float("inf"), "zero": 0.0,
    "negative": -1.0, "text": "1", "array": [1.0],
}  # fmt: skip
FACTORS = {
    "none_float": [1.0, 1.0], "text": "1", "rank": np.ones((2, 4), "float32"),
    "scalar": np.ones((), "float32"), "double": np.ones(8), "ints": np.ones(8, "int32"),
}  # fmt: skip
CONFIG = {
    "max_num_sequences": BELOW_ONE | NO_INT,
    "max_total_tokens": BELOW_ONE | NO_INT | {"slots": 2**31 - 1},
    "prefill_chunk_size": BELOW_ONE | NO_INT,
    "page_size": BELOW_ONE | NO_INT | {"three": 3, "large": 512},
    "dtype": {"text": "float", "int": 1, "none": None, "int8": "int8", "lanes": "float32x4"},
    "kv_dtype": {"text": "float", "int": 1, "int8": "int8", "array": ["float32"]},
    "rope_mode": {"negative": -1, "three": 3, "wide": 2**32, "high": 2**63 - 1} | NO_INT,
    "aux_manager": {"text": "other", "int": 1, "array": []},
    "rope_ext_factors": FACTORS,
    "layers": {"none": None, "empty": [], "text": "x", "nones": [None], "maps": [{}], "ints": [1]},
    "unknown": {"int": 1, "none": None},
}
LAYER_FIELDS = {
    "kind": {"none": None, "text": "convolution", "int": 0},
    "window": {"of_no_use": 5, "negative": -1, "text": "5"},
    "num_qo_heads": BELOW_ONE | NO_INT | {"three": 3},
    "num_kv_heads": BELOW_ONE | NO_INT | {"three": 3},
    "qk_head_dim": BELOW_ONE | NO_INT,
    "v_head_dim": {key: x for key, x in BELOW_ONE.items()} | NO_INT,
    "mla_original_qk_head_dim": {"of_no_use": 8, "negative": -1, "text": "8"},
    "rope_mode": {"negative": -1, "three": 3, "wide": 2**32} | NO_INT,
    "rope_theta": NO_SCALE,
    "rope_scale": NO_SCALE,
    "kernel_set": {"negative": -1, "one": 1, "high": 2**63 - 1, "wide": 2**32, "text": "0"},
    "unknown": {"int": 1},
    "kv_dtype": {"none_known": "int8", "int": 1, "text": "float"},  # a codec comes with its sizes
}
CODEC = {"name": "int8", "row_bytes": 8, "scale_bytes": 4, "page_bytes": 192, "revision": 1}
SIZES = {
    "zero": 0, "negative": -1, "low": -(2**63), "high": 2**63 - 1, "wide": 2**32, "text": "8",
    "half": 8.5, "none": None, "array": [8],
}  # fmt: skip
CODECS = {
    "text": "int8", "int": 8, "empty": {}, "array": [CODEC], "unknown": CODEC | {"colour": 1},
    "no_name": CODEC | {"name": ""}, "name": CODEC | {"name": 3},
    "other": CODEC | {"name": "int4"}, "small": CODEC | {"page_bytes": 191},
    **{f"{field}_{name}": CODEC | {field: size}
       for field in ("row_bytes", "scale_bytes", "page_bytes", "revision")
       for name, size in SIZES.items()},
}  # fmt: skip
KERNEL_MAPS = {
    "none": None, "text": "prefill", "empty": {}, "nothing": [], "nones": [None], "ints": [1],
    "number": KERNELS | {"prefill": 1}, "missing": {"prefill": KERNELS["prefill"]},
    "no_tag": KERNELS | {"prefill": [KERNELS["prefill"]]},
    "tag": KERNELS | {"prefill": ["other", KERNELS["prefill"]]},
    "half": KERNELS | {"prefill": ["tirx"]}, "nested": [[KERNELS]], "unknown": {"x": print},
    "tag_alone": KERNELS | {"prefill": ["flashinfer", print]}, "two_sets": [KERNELS, {"x": 1}],
}  # fmt: skip
COMPILED_FOR_CHANGES = {
    "other_pages": {"page_size": 8}, "no_pages": {"page_size": None}, "text": {"page_size": "4"},
    "machine": {"architecture": "pdp11"}, "machine_type": {"architecture": 1},
    "no_features": {"features": None}, "feature": {"features": ["no_such_feature"]},
    "features_text": {"features": "avx2"}, "ints": {"features": [1]}, "unknown": {"colour": 1},
}  # fmt: skip
# More than any machine has, in one piece or in many.
LARGE = {
    "one": ({"max_total_tokens": 2**31 - 512}, {"qk_head_dim": 4096, "num_kv_heads": 4}),
    "many_layers": ({"max_total_tokens": 2**20, "num_layers": 4000}, {"qk_head_dim": 64}),
    "chunk": (
        {"prefill_chunk_size": 2**31 - 1},
        {"qk_head_dim": 4096, "num_qo_heads": 4096, "num_kv_heads": 1},
    ),
    "window": (
        {"max_total_tokens": 2**31 - 512, "page_size": 1, "max_num_sequences": 2**31 - 1},
        {"kind": "mha_sliding", "window": 2**31 - 1, "qk_head_dim": 1024},
    ),
}


def refused(errors: tuple, function: Callable, *args: Any) -> None:
    with pytest.raises(errors):
        function(*args)


def made(value: Any) -> Any:
    """Resolve a table of values: call functions, turn arrays into tensors."""
    if value is make_cache:
        return make_cache()
    return tvm.runtime.tensor(value) if isinstance(value, np.ndarray) else value


COMPILED_FOR = {"page_size": 4, "architecture": platform.machine(), "features": []}


def good_arguments(name: str) -> list[Any]:
    """Arguments with which a global function makes a cache."""
    if name == "pagedkv.create":
        return [make_config(), KERNELS, tvm.cpu()]
    return [make_config(), KERNELS, tvm.runtime.tensor(np.zeros((), "float32")), COMPILED_FOR]


def creation_cases(function: str) -> Iterator[tuple[str, Callable[[], None]]]:
    create = tvm_ffi.get_global_func(function)
    good = good_arguments(function)

    def case(config: Any, kernels: Any = KERNELS, device: Any = good[2]) -> Callable[[], None]:
        return lambda: refused(ERRORS, create, config, kernels, device, *good[3:])

    for field, values in CONFIG.items():
        for name, value in values.items():
            mode = {"rope_mode": 1} if field == "rope_ext_factors" else {}
            yield f"{field}: {name}", case(make_config() | mode | {field: made(value)})
    for field, values in LAYER_FIELDS.items():
        for name, value in values.items():
            layers = [LAYER, LAYER | {field: made(value)}]
            mode = int(field.startswith("rope"))  # without a rotation any number will do
            config = make_config(layers=layers, rope_mode=mode)
            yield f"layer {field}: {name}", case(config)
    for name, value in CODECS.items():
        layers = [LAYER, LAYER | {"kv_dtype": "int8", "codec": value}]
        yield f"codec: {name}", case(make_config(layers=layers))
    for field, value in (("window", -25), ("v_head_dim", 25), ("num_kv_heads", 25)):
        yield f"mla {field}", case(make_config(layers=[MLA_LAYER | {field: value}]), MLA_KERNELS)
    for name, value in KERNEL_MAPS.items():
        yield f"kernels: {name}", case(make_config(), value)
    if function == CREATE_IN_MODEL:
        for name, changes in COMPILED_FOR_CHANGES.items():
            yield (
                f"compiled for: {name}",
                lambda x=changes: refused(ERRORS, create, *good[:3], COMPILED_FOR | x),
            )
    for name in ("cuda", "rocm", "vulkan", "metal", "opencl", "hexagon"):
        device = tvm.device(name, 0)
        if not device.exist:
            yield f"device: {name}", case(make_config(), KERNELS, device)
    yield "device: cuda 9999", case(make_config(), KERNELS, tvm.device("cuda", 9999))
    yield "device: none", case(make_config(), KERNELS, None)
    yield "device: text", case(make_config(), KERNELS, "gpu of somebody")
    for index in range(len(good)):
        for name, make in wrong_types(Kind(lambda i=index: good[i], {})):
            # A map or an array may be right where one is expected; the tables above have these.
            if name in ("map", "device", "array", "array_of_none") or name == "text":
                continue
            args = [*good[:index], make, *good[index + 1 :]]
            yield (
                f"argument {index}: {name}",
                lambda a=args, i=index: refused(ERRORS, create, *a[:i], a[i](), *a[i + 1 :]),
            )
    for count in range(len(good)):
        yield f"{count} arguments", lambda n=count: refused(ERRORS, create, *good[:n])


@pytest.mark.parametrize("function", ["pagedkv.create", CREATE_IN_MODEL])
def test_hostile_creation(function):
    tvm_ffi.get_global_func(function)(*good_arguments(function))
    failed = failures(creation_cases(function))
    assert not failed, f"{len(failed)} cases\n" + "\n".join(failed[:20])


@pytest.mark.parametrize("name", LARGE)
def test_a_cache_that_does_not_fit_is_an_error(name):
    fields, layer = LARGE[name]
    num_layers = fields.get("num_layers", 1)
    config = make_config(layers=[{**LAYER, **layer}] * num_layers) | {
        key: value for key, value in fields.items() if key != "num_layers"
    }
    create = tvm_ffi.get_global_func("pagedkv.create")
    case = (name, lambda: refused((MemoryError,), create, config, KERNELS, tvm.cpu()))
    assert failures([case]) == []


def positional(**changes: Any) -> list[Any]:
    """The 28 arguments of the stock constructor for a small cache."""
    array = ["tirx", KERNELS["prefill"]]
    args = {
        "sizes": Shape([4, 64, 16, 16, 0]), "layers": Shape([0, 2]), "qo_heads": 4, "kv_heads": 2,
        "qk_dim": 8, "v_dim": 8, "kinds": Shape([0, 0]), "transfer": False, "mode": 0,
        "scale": 1.0, "theta": 1e4, "factors": None,
        "prototype": tvm.runtime.tensor(np.zeros((), "float32")),
        "append": KERNELS["transpose_append"], "append_mla": None,
        "prefill_ragged": ["tirx", KERNELS["prefill_ragged"]], "prefill": array,
        "decode": ["tirx", KERNELS["decode"]], "prefill_sliding": [], "decode_sliding": [],
        "tree_paged": [], "tree": [], "mla_prefill": [], "merge": [KERNELS["merge"]],
        "split_rotary": KERNELS["split_rotary"], "copy": KERNELS["copy_single_page"],
        "debug_get_kv": print, "compact": print,
    }  # fmt: skip
    return list((args | changes).values())


POSITIONAL = {
    "sizes": {
        "none": None, "few": Shape([4, 64, 16]), "empty": Shape([]), "zeros": Shape([0] * 5),
        "negative": Shape([-1] * 5), "high": Shape([2**63 - 1] * 5), "text": "x",
        "wide": Shape([2**32 + 4, 64, 16, 16, 0]), "page": Shape([4, 64, 16, 12, 0]),
        "no_page": Shape([4, 64, 16, 0, 1]), "windows": Shape([2**31 - 1, 64, 16, 16, 1]),
        "no_step": Shape([0, 64, 0, 16, 1]), "last": Shape([4, 2**31 - 257, 16, 16, 0]),
    },
    "layers": {
        "none": None, "one": Shape([0]), "empty": Shape([]), "backward": Shape([2, 0]),
        "high": Shape([0, 2**63 - 1]), "negative": Shape([-2, 0]), "text": "x",
    },
    "qo_heads": BELOW_ONE | NO_INT | {"three": 3},
    "kv_heads": BELOW_ONE | NO_INT | {"three": 3},
    "qk_dim": BELOW_ONE | NO_INT,
    "v_dim": BELOW_ONE | NO_INT,
    "kinds": {
        "none": None, "empty": Shape([]), "one": Shape([0]), "unknown": Shape([0, 4]),
        "low": Shape([0, -(2**63)]), "wide": Shape([0, 2**32]), "sliding": Shape([3, 3]),
        "mla": Shape([1, 1]), "last": Shape([0, 5]),
    },
    "transfer": {"text": "yes", "array": []},
    "mode": {"shape": Shape([0, 0]), "negative": -1, "three": 3, "wide": 2**32} | NO_INT,
    "scale": NO_SCALE,
    "theta": NO_SCALE,
    "prototype": {
        "none": None, "int": 0, "text": "float32", "ints": np.zeros(1, "int32"),
        "double": np.zeros(1, "float64"),
    },
    "append": {"none": None, "int": 1, "text": "x", "empty": []},
    "prefill_ragged": {"int": 1, "text": "x", "tag": ["other", print], "no_function": ["tirx"]},
    "prefill": {"none": None, "empty": [], "int": 1, "tag": ["tirx", 1], "two": ["tirx"] * 2},
    "decode": {"none": None, "empty": [], "int": 1, "tag": [1, print]},
    "merge": {"none": None, "int": 1, "ints": [1], "text": "x"},
    "split_rotary": {"none": None, "int": 1, "four": [1, 2, 3, 4], "short": ["pagedkv"]},
    "copy": {"none": None, "int": 1, "text": "x"},
}  # fmt: skip


def test_hostile_positional_creation():
    create = tvm_ffi.get_global_func("vm.builtin.paged_attention_kv_cache_create")
    create(*positional())

    def cases():
        for name, values in POSITIONAL.items():
            for which, value in values.items():
                mode = {"mode": 1} if name in ("scale", "theta") else {}
                args = positional(**mode, **{name: made(value)})
                yield f"{name}: {which}", lambda a=args: refused(ERRORS, create, *a)
        for count in (0, 1, 27):
            yield f"{count} arguments", lambda n=count: refused(ERRORS, create, *positional()[:n])
        yield "30 arguments", lambda: refused(ERRORS, create, *positional(), None, None)
        yield "all none", lambda: refused(ERRORS, create, *[None] * 28)

    failed = failures(cases())
    assert not failed, f"{len(failed)} cases\n" + "\n".join(failed[:20])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
