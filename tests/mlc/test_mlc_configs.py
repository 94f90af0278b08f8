# SPDX-License-Identifier: Apache-2.0
"""Configurations of newer transformers as mlc-llm reads them, and TVM's names."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from tvm import relax

from tvm_pagedkv.mlc.drift import add_missing_tvm_names, with_older_rope_fields
from tvm_pagedkv.mlc.patches import Overlay, Patches

from ..support.harness.older_release import IS_OLDER, PREFIX


@pytest.fixture
def names():
    patches = Patches()
    add_missing_tvm_names(patches)
    yield
    patches.undo()


def test_rope_parameters_become_the_older_fields():
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    source = {"hidden_size": 8, "rope_parameters": {"rope_theta": 5e5, **scaling}}
    read = with_older_rope_fields(source, {"rope_theta", "rope_scaling"})
    assert read["rope_theta"] == 5e5
    assert read["rope_scaling"] == scaling | {"type": "llama3"}
    assert read["original_max_position_embeddings"] == 64
    assert source == {"hidden_size": 8, "rope_parameters": {"rope_theta": 5e5, **scaling}}


def test_default_rope_is_no_scaling():
    parameters = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    read = with_older_rope_fields({"rope_parameters": parameters}, set())
    assert "rope_scaling" not in read
    assert (read["rope_theta"], read["partial_rotary_factor"]) == (1e6, 0.25)
    assert read["rotary_pct"] == 0.25  # GPT-NeoX's name


def test_fields_that_are_there_stay():
    source = {
        "rope_theta": 7.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 8.0},
    }
    assert with_older_rope_fields(source, set()) == source


def test_a_class_that_knows_rope_parameters_gets_them():
    source = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 8.0}}
    assert with_older_rope_fields(source, {"rope_parameters"}) == source


def test_gemma3_has_the_parameters_of_full_attention():
    of_kind = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert with_older_rope_fields({"rope_parameters": of_kind}, set())["rope_theta"] == 1e6


def test_yarn_has_what_tvm_asserts():
    scaling = {"type": "yarn", "factor": 4.0, "beta_slow": 2}
    read = with_older_rope_fields({"rope_theta": 100.0, "rope_scaling": scaling}, set())
    assert read["rope_scaling"] == {
        "rope_type": "yarn",
        "beta_fast": 32,
        "inv_theta_log_scale": 1 / (2 * math.log(100.0)),
        **scaling,
    }


@pytest.mark.skipif(IS_OLDER, reason=PREFIX + "constants have other fields")
def test_names_of_constants(names):
    array = tvm.runtime.tensor(np.arange(3, dtype="float32"))
    constant, dtype, text = (
        relax.Constant(array),
        relax.DataTypeImm("float16"),
        relax.StringImm("x"),
    )
    assert isinstance(constant, relax.Constant) and not isinstance(constant, relax.DataTypeImm)
    assert isinstance(dtype, relax.DataTypeImm) and not isinstance(dtype, relax.Constant)
    assert isinstance(relax.const(np.ones(2, "float32")), relax.Constant)
    assert isinstance(text, relax.StringImm) and text.value == "x"
    assert str(dtype.value) == "float16"
    np.testing.assert_array_equal(constant.value.numpy(), array.numpy())
    assert relax.Var("x", relax.AnyType()).name_hint == "x"


def test_names_that_are_there_are_left_alone(monkeypatch):
    monkeypatch.setattr(relax, "StringImm", "as it is", raising=False)
    patches = Patches()
    add_missing_tvm_names(patches)
    assert relax.StringImm == "as it is"
    patches.undo()
    assert relax.StringImm == "as it is"


def test_patches_put_back_class_methods_and_inherited_ones():
    class Base:
        @classmethod
        def make(cls):
            return cls.__name__

    class Derived(Base):
        pass

    patches = Patches()
    patches.set(Base, "make", classmethod(lambda cls: "other"))
    patches.set(Derived, "make", None)
    patches.undo()
    assert (Base.make(), Derived.make(), "make" in vars(Derived)) == ("Base", "Derived", False)


def test_an_overlay_hides_nothing_else():
    seen = Overlay(math, pi=3)
    assert (seen.pi, seen.e, math.pi) == (3, math.e, math.acos(-1))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
