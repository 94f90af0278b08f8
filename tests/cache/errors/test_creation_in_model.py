# SPDX-License-Identifier: Apache-2.0
"""`pagedkv.create_in_model`, which compiled models call: `pagedkv.create` for an engine."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_pagedkv as pkv
from tvm_pagedkv.relax.own_creation import CREATE_IN_MODEL

from ...support.emulators.python_kernels import (
    KERNELS,
    LAYER,
    MLA_KERNELS,
    MLA_LAYER,
    make_cache,
    make_config,
)

COMPILED_FOR = {"page_size": 4, "architecture": platform.machine(), "features": []}
PROTOTYPE = np.zeros((), "float32")


def create(config, kernels=KERNELS, prototype=PROTOTYPE, compiled_for=COMPILED_FOR) -> pkv.KVCache:
    tensor = None if prototype is None else tvm.runtime.tensor(prototype)
    return tvm_ffi.get_global_func(CREATE_IN_MODEL)(config, kernels, tensor, compiled_for)


@pytest.mark.parametrize("has_windows, num_spare", [(False, 1), (True, 1 + 2 * 8)])
def test_the_cache_is_that_of_create_with_pages_to_spare(has_windows, num_spare):
    fields = {"sliding_window": has_windows, "rope_mode": 1}
    cache, plain = create(make_config(**fields)), make_cache(**fields)
    for name in ("layers", "layout", "page_size", "kv_dtype"):
        assert cache.description[name] == plain.description[name]
    assert cache.num_available_pages() == plain.num_available_pages() + num_spare


def test_maps_of_kernels_for_layers_of_each_kind():
    layers = [LAYER, MLA_LAYER | {"kernel_set": 1}, {"kind": "linear"}]
    cache = create(make_config(layers=layers), [KERNELS, MLA_KERNELS])
    assert [layer["kernel_set"] for layer in cache.description["layers"]] == [0, 1]


def test_windows_of_sequences_have_no_effect_beside_windows_of_layers():
    for layer in (LAYER | {"kind": "mha_sliding"}, LAYER | {"kind": "mha_chunked"}, MLA_LAYER):
        layers = [LAYER, layer | {"window": 5, "kernel_set": int(layer["kind"] == "mla")}]
        cache = create(make_config(layers=layers, sliding_window=True), [KERNELS, MLA_KERNELS])
        cache.add_sequence(0)
        cache.enable_sliding_window(0, 4, 1)
        assert cache.sequence_window(0) == (0, 0, 0)


ERRORS = {
    "unknown_field": ({"config": {"colour": 1}}, ValueError, "unknown field 'colour' in config"),
    "type": ({"config": {"dtype": 3}}, TypeError, r"config\['dtype'\] has the wrong type: int"),
    "layer": (
        {"config": {"layers": [LAYER | {"size": 1}]}},
        ValueError,
        r"unknown field 'size' in config\['layers'\]\[0\]",
    ),
    "unknown_kernel": ({"kernels": {"other": print}}, ValueError, "unknown kernel 'other'; known"),
    "no_kernel": ({"kernels": {"decode": None}}, ValueError, "kernels that are missing: decode"),
    "kernel_type": ({"kernels": {"decode": 1}}, TypeError, "'decode' must be a function"),
    "page_size": (
        {"compiled_for": {"page_size": 32}},
        ValueError,
        "compiled for pages of 32 slots, but page_size is 4",
    ),
    "no_page_size": ({"compiled_for": {"page_size": None}}, ValueError, "lacks the field 'page_s"),
    "machine": (
        {"compiled_for": {"architecture": "pdp11"}},
        ValueError,
        "the model's kernels cannot run here: compiled for pdp11",
    ),
    "features": (
        {"compiled_for": {"features": ["no_such_feature"]}},
        ValueError,
        "no_such_feature",
    ),
    "features_type": (
        {"compiled_for": {"features": "avx2"}},
        TypeError,
        r"compiled_for\['features'\] has the wrong type",
    ),
    "unknown": (
        {"compiled_for": {"cpu": "avx2"}},
        ValueError,
        "unknown field 'cpu' in compiled_for; known: page_size, architecture, features",
    ),
    "prototype": ({"prototype": None}, TypeError, "device needs a tensor"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    changes, error, message = ERRORS[name]
    defaults = {"config": make_config(), "kernels": KERNELS, "compiled_for": COMPILED_FOR}
    arguments = {key: value | changes.get(key, {}) for key, value in defaults.items()}
    prototype = changes.get("prototype", PROTOTYPE)
    with pytest.raises(error, match=message):
        create(arguments["config"], arguments["kernels"], prototype, arguments["compiled_for"])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
