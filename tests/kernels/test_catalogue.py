# SPDX-License-Identifier: Apache-2.0
"""The catalogue names the kernels that the runtime asks for, and says what each is called with."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tir_kernels import build_kernel, kernel_names
from tir_kernels.catalogue import KERNELS
from tir_kernels.conv_spec import ConvSpec
from tir_kernels.index_spec import IndexSpec
from tir_kernels.recurrent_spec import RecurrentSpec
from tir_kernels.spec import CudaTarget, KernelSpec, RopeSpec, VectorTarget

ROOT = Path(__file__).parents[2]
TARGETS = {"cpu": VectorTarget(), "gpu": CudaTarget()}
_OPTIONS = {"lists": True, "page_bounds": True, "spans": True}
_MLA = KernelSpec(
    4, 1, 64, 32, rope=RopeSpec(rotary_dim=0), kind="mla", original_qk_head_dim=24,
    original_v_head_dim=16,
)  # fmt: skip
SPECS = [
    KernelSpec(4, 2, 64, 64, rope=RopeSpec(rotary_dim=64), **_OPTIONS),
    KernelSpec(
        4, 2, 64, 64, rope=RopeSpec(rotary_dim=64), kind="mha_sliding", lists=True, spans=True
    ),
    _MLA,
    replace(_MLA, kind="mla_sliding"),
    RecurrentSpec("gated_delta", 2, 1, 8, 8),
    ConvSpec(16, 4, has_bias=True),
    IndexSpec(4, 32),
]


def needed_on(target: str) -> dict[str, KernelSpec | RecurrentSpec | ConvSpec | IndexSpec]:
    """Kernel -> a spec whose layers need it."""
    found = {}
    for spec in SPECS:
        if not isinstance(spec, IndexSpec) or target == "cpu":
            spec = replace(spec, target=TARGETS[target])
            found |= dict.fromkeys(kernel_names(spec, for_stock=True), spec)
    return found


def test_the_runtime_has_the_same_names():
    files = sorted((ROOT / "runtime_ext/config").glob("kernel*"))
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    names = re.findall(r'^(?: {4}|KERNEL\(\w+, )"(\w+)"[,)]', source, re.MULTILINE)
    assert len(names) == len({*names})
    assert {*names} == {name for name, kernel in KERNELS.items() if not kernel.is_for_stock}


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_is_needed_by_some_layers(target):
    has = {name for name, kernel in KERNELS.items() if kernel.module(TARGETS[target])}
    assert {*needed_on(target)} == has


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_have_the_parameters_of_their_signatures(target):
    for name, spec in needed_on(target).items():
        parameters = [parameter.name for parameter in build_kernel(name, spec).params]
        signature = KERNELS[name].signature
        assert parameters == [each for each in signature.names if each in parameters], name
        optional = {"sink_logits", "kv_scales", "ext_factors"}
        assert {*signature.names} - {*parameters} <= optional, name


def test_what_signatures_tell():
    with_window = {name for name, kernel in KERNELS.items() if kernel.has_window}
    assert with_window == {name for name in KERNELS if name.endswith("_sliding")}
    before = {name for name, kernel in KERNELS.items() if kernel.rotates_new_rows}
    assert before == {"split_rotary", "rope_append", "append_prefill"}
    assert all(kernel.attends for kernel in KERNELS.values() if kernel.can_rotate_inside)
    assert not any(KERNELS[name].can_rotate_inside for name in KERNELS if name.startswith("mla_"))


def test_options_decide_about_kernels():
    plain = KernelSpec(4, 2, 64, 64)
    of_spans = {"prefill_spans", "prefill_spans_sliding"}
    assert not of_spans & {*kernel_names(plain)}
    assert of_spans & {*kernel_names(replace(plain, spans=True))} == {"prefill_spans"}
    assert "apply_sinks" not in kernel_names(replace(plain, sink_logits=True))
    assert not {"decode_windowed", "prefill_windowed"} & {*kernel_names(plain)}
    absorbed = replace(_MLA, original_qk_head_dim=0, original_v_head_dim=0)
    assert {*kernel_names(_MLA)} - {*kernel_names(absorbed)} == {"prefill_ragged", "tree"}
    with pytest.raises(ValueError, match="index lanes have kernels for CPUs only"):
        kernel_names(IndexSpec(4, 32, target=CudaTarget()))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
