# SPDX-License-Identifier: Apache-2.0
"""A configuration keeps what the user said; what follows from it is resolved apart."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import tvm.testing

import tvm_pagedkv as pkv
from tvm_pagedkv.config import standard_slopes

SLOPES = (0.5, 0.25, 0.125, 0.0625)


def config_of(**changes: object) -> pkv.KVCacheConfig:
    fields = {"num_layers": 2, "num_qo_heads": 4, "num_kv_heads": 2, "qk_head_dim": 32}
    return pkv.KVCacheConfig(**{**fields, **changes})


CONFIGS = {
    "plain": config_of(),
    "layers": config_of(
        layers=[
            pkv.LayerSpec(kind="mha_sliding", window=8, alibi=[*SLOPES]),
            pkv.LayerSpec(rope=pkv.RopeConfig(mode="none"), kv_dtype="int8"),
        ],
    ),
    "stages": config_of(layer_indptr=[0, 1, 2], stage=1, kv_dtype="int4", alibi=True),
    "prefix_cache": config_of(prefix_cache=pkv.PrefixCacheConfig(host_bytes=1 << 20)),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.mark.parametrize(
    ("changes", "name", "values"),
    [
        ({"qk_head_dim": 64}, "qk_head_dim", (64, 64)),
        ({"qk_head_dim": 64}, "v_head_dim", (64, 64)),
        ({"dtype": "float32"}, "kv_dtype", ("float32", "float32")),
        ({"kv_dtype": "int8"}, "kv_dtype", ("int8", "int8")),
        ({"num_qo_heads": 8}, "num_qo_heads", (8, 8)),
        ({"num_kv_heads": 1}, "num_kv_heads", (1, 1)),
        ({"rope": pkv.RopeConfig(theta=5e5)}, "rope", (pkv.RopeConfig(theta=5e5),) * 2),
        ({"alibi": SLOPES}, "alibi", (SLOPES, SLOPES)),
        ({"alibi": True, "num_qo_heads": 8}, "alibi", (standard_slopes(8),) * 2),
        ({"num_layers": 3}, "kind", ("mha",) * 3),
    ],
    ids=str,
)
def test_replacing_a_field_reaches_the_layers(changes: dict, name: str, values: tuple) -> None:
    changed = replace(config_of(), **changes)
    assert tuple(getattr(layer, name) for layer in changed.resolved().layers) == values
    assert changed == config_of(**changes)
    assert changed.resolved() == config_of(**changes).resolved()


def test_replacing_a_field_keeps_what_a_layer_says() -> None:
    layers = [pkv.LayerSpec(num_kv_heads=4, kv_dtype="int8", alibi=False), pkv.LayerSpec()]
    config = replace(config_of(layers=layers), num_kv_heads=1, kv_dtype="int4", alibi=True)
    first, second = config.resolved().layers
    assert (first.num_kv_heads, first.kv_dtype, first.alibi) == (4, "int8", None)
    assert (second.num_kv_heads, second.kv_dtype) == (1, "int4")
    assert second.alibi == standard_slopes(4)


def test_replacing_the_number_of_layers_resolves_the_stages() -> None:
    assert config_of().resolved().layer_indptr == (0, 2)
    assert replace(config_of(), num_layers=5).resolved().layer_indptr == (0, 5)


def test_a_layer_of_another_configuration_takes_the_values_of_its_new_one() -> None:
    config = config_of(layers=[pkv.LayerSpec(), pkv.LayerSpec(window=8, kind="mha_sliding")])
    wide = config_of(qk_head_dim=64, layers=config.layers)
    assert [layer.qk_head_dim for layer in wide.resolved().layers] == [64, 64]


@each_config
def test_the_fields_are_those_that_were_given(config: pkv.KVCacheConfig) -> None:
    given = vars(config).copy()
    config.resolved()
    assert vars(config) == given
    assert config_of().layers is config_of().kv_dtype is config_of().v_head_dim is None
    assert config_of().layer_indptr is None


@each_config
def test_copies_equal_the_original(config: pkv.KVCacheConfig) -> None:
    copies = [
        replace(config),
        pkv.KVCacheConfig(**vars(config)),
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        eval(repr(config), vars(pkv)),
    ]
    for each in copies:
        assert each == config and hash(each) == hash(config)
        assert each.resolved() == config.resolved()
        assert hash(each.resolved()) == hash(config.resolved())


def test_configurations_of_one_meaning_resolve_alike() -> None:
    said = config_of(v_head_dim=32, kv_dtype="float16", layers=[pkv.LayerSpec()] * 2)
    assert said != config_of()
    assert said.resolved() == config_of().resolved()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_head_dim": 20}, "qk_head_dim must be a multiple of 8, got 20"),
        ({"num_kv_heads": 3}, r"num_qo_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ({"num_layers": 3}, "layers has 2 entries for 3 layers"),
        ({"alibi": SLOPES[:3]}, "alibi needs a slope for each of 4 heads, got 3"),
        ({"layer_indptr": [0, 1]}, "layer_indptr must begin with 0, ascend, and end with"),
        ({"kv_dtype": "int3"}, "kv_dtype must be one of"),
    ],
    ids=str,
)
def test_what_is_replaced_is_validated(changes: dict, message: str) -> None:
    config = config_of(layers=[pkv.LayerSpec()] * 2)
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)


def test_a_rotation_that_is_turned_off_keeps_its_base() -> None:
    rope = pkv.RopeConfig(theta=5e5, scale=2.0)
    off = replace(rope, mode="none")
    assert replace(off, mode="normal") == rope
    # The kernels of layers without a rotation are the same, whatever its base would be.
    linear = {"rope_type": "linear", "factor": 2.0}
    others = [
        pkv.RopeConfig(mode="none", theta=-1),
        pkv.RopeConfig(mode="none", rotary_dim=8, scaling=linear),
    ]
    for other in others:
        assert config_of(rope=other).resolved() == config_of(rope=off).resolved()


def test_a_rotation_needs_a_base() -> None:
    with pytest.raises(ValueError, match=r"rope\.theta must be positive and finite, got -1"):
        replace(pkv.RopeConfig(mode="none", theta=-1), mode="normal")


def test_the_default_write_policy_follows_the_store() -> None:
    host = pkv.PrefixCacheConfig(host_bytes=1 << 20)
    assert host.write_policy is None and host.resolved_write_policy == "back"
    with_store = replace(host, disk_path="pages", model_id="model")
    assert with_store.resolved_write_policy == "through"
    assert replace(with_store, disk_path=None).resolved_write_policy == "back"
    assert replace(with_store, write_policy="selective").resolved_write_policy == "selective"


if __name__ == "__main__":
    tvm.testing.main()
