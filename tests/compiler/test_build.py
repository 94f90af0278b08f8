# SPDX-License-Identifier: Apache-2.0
"""Building kernels: targets, sets of layers, and the files on disk whatever happens to them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm

import tir_kernels
import tvm_pagedkv
from tvm_pagedkv.compiler.build import build_kernels, resolve_target, vector_target
from tvm_pagedkv.compiler.create import config_map
from tvm_pagedkv.compiler.targets import native_target
from tvm_pagedkv.config import KVCacheConfig, LayerSpec, RopeConfig

from .. import reference
from ..support.harness import fast_compilation
from ..support.harness.fast_compilation import path_of_children

# The package's attribute of this name is the function.
build = importlib.import_module("tvm_pagedkv.compiler.build")
targets = importlib.import_module("tvm_pagedkv.compiler.targets")

needs_x86 = pytest.mark.skipif(
    not str(tvm.target.codegen.llvm_get_system_triple()).startswith("x86_64"),
    reason="needs an x86 CPU",
)
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 4096,
}


def make_config(**changes) -> KVCacheConfig:
    fields = {"num_layers": 2, "num_qo_heads": 4, "num_kv_heads": 2, "qk_head_dim": 32}
    return KVCacheConfig(**(fields | {"dtype": "float32"} | changes))


@pytest.fixture
def cache_dir(tmp_path, monkeypatch) -> Path:
    """An empty folder for compiled kernels, and two small kernels to compile."""
    few = {name: tir_kernels.catalogue.KERNELS[name] for name in ("merge", "copy_single_page")}
    monkeypatch.setattr(tir_kernels.catalogue, "KERNELS", few)
    monkeypatch.setenv("TVM_PAGEDKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def check_merge(kernels) -> None:
    """The loaded kernels compute: merge two states."""
    rng = np.random.default_rng(0)
    o, o_other = rng.standard_normal((2, 5, 4, 32), dtype=np.float32)
    lse, lse_other = rng.standard_normal((2, 5, 4), dtype=np.float32)
    actual = tvm.runtime.tensor(o), tvm.runtime.tensor(lse)
    kernels["merge"](*actual, tvm.runtime.tensor(o_other), tvm.runtime.tensor(lse_other))
    expected = reference.merge(o, lse, o_other, lse_other)
    reference.assert_state_close([x.numpy() for x in actual], expected, "float32")


# --- targets ------------------------------------------------------------------------------------


@needs_x86
def test_vector_traits_follow_the_target():
    assert vector_target("x86-64-v4").lanes == 16
    assert not vector_target("x86-64-v4").has_bf16_dot
    assert vector_target("znver4").has_bf16_dot
    assert vector_target("x86-64-v3") == vector_target({"kind": "llvm", "mcpu": "x86-64-v3"})
    assert vector_target("x86-64-v3").lanes == 8
    assert not vector_target("znver5").has_amx
    assert vector_target("sapphirerapids").has_amx
    off = {"kind": "llvm", "mcpu": "sapphirerapids", "mattr": ["-amx-tile"]}
    assert not vector_target(off).has_amx
    assert vector_target(off).has_bf16_dot
    generic = vector_target(tvm.target.Target("llvm"))
    assert generic.lanes == 4
    assert not generic.has_f16_convert


@needs_x86
def test_a_target_without_a_cpu_is_told_from_this_machine(monkeypatch, caplog):
    """Kernels for ``llvm`` alone take a multiple of the time, and nothing else says why."""
    targets._warn_without_cpu.cache_clear()
    features = frozenset(_features("x86-64-v3"))
    monkeypatch.setattr(targets, "cpu_features", lambda: features)
    for target in (tvm.target.Target("llvm"), "llvm", "llvm", "x86-64", None):
        vector_target(target)
    (record,) = caplog.records
    assert "vectors of 128 bits, and this machine's CPU has vectors of 256" in record.getMessage()
    assert "mcpu='x86-64-v3'" in record.getMessage()
    caplog.clear()
    targets._warn_without_cpu.cache_clear()
    monkeypatch.setattr(targets, "cpu_features", lambda: frozenset(_features("x86-64")))
    vector_target("llvm")
    assert not caplog.records
    targets._warn_without_cpu.cache_clear()


def test_native_is_the_default():
    assert str(resolve_target()) == str(resolve_target("native")) == str(native_target())
    assert vector_target().lanes >= 4


def _features(cpu: str) -> set[str]:
    return set(targets.required_features(resolve_target({"kind": "llvm", "mcpu": cpu})))


AMX = ["amx_bf16", "amx_int8", "amx_tile"]


@needs_x86
@pytest.mark.parametrize(
    "has, more, lacks, cpu, attributes",
    [
        ("x86-64", [], [], "x86-64", ()),
        ("x86-64-v2", [], [], "x86-64", ()),
        ("x86-64-v3", [], [], "x86-64-v3", ()),
        ("x86-64-v3", ["avx_vnni"], [], "x86-64-v3", ("+avxvnni", "+fast-dpwssd")),
        ("x86-64-v3", [], ["popcnt"], "x86-64", ()),
        ("x86-64-v4", [], [], "x86-64-v4", ()),
        ("x86-64-v4", [], ["avx2"], "x86-64", ()),  # which a hypervisor hides
        ("x86-64-v4", ["avx512_bf16"], [], "x86-64-v4", ("+avx512bf16",)),
        ("x86-64-v3", ["avx512_bf16"], [], "x86-64-v3", ()),
        (
            "sapphirerapids",
            [],
            [],
            "x86-64-v4",
            ("+amx-bf16", "+amx-tile", "+avx512bf16", "+avx512vnni"),
        ),
        ("sapphirerapids", [], AMX, "x86-64-v4", ("+avx512bf16", "+avx512vnni")),  # refused
        ("sapphirerapids", [], [*AMX, "avx512_bf16"], "x86-64-v4", ("+avx512vnni",)),
    ],
)
def test_native_is_the_highest_level_that_the_cpu_has(
    monkeypatch, has, more, lacks, cpu, attributes
):
    features = frozenset((_features(has) | {*more}) - {*lacks})
    monkeypatch.setattr(targets, "cpu_features", lambda: features)
    target = resolve_target("native")
    assert target.attrs["mcpu"] == cpu
    assert tuple(target.attrs.get("mattr", ())) == attributes
    assert features.issuperset(targets.required_features(target))


def test_targets_that_cannot_be_served():
    with pytest.raises(ValueError, match="got 'pentium-9'"):
        resolve_target("pentium-9")
    with pytest.raises(ValueError, match="not for 'c'"):
        resolve_target(tvm.target.Target("c"))


# --- sets ---------------------------------------------------------------------------------------


def test_layers_that_are_alike_share_a_set(cache_dir):
    far = RopeConfig(theta=1e6)
    layers = [LayerSpec(), LayerSpec(rope=far), LayerSpec(), LayerSpec(num_kv_heads=4)]
    built = build_kernels(make_config(num_layers=4, layers=layers))
    assert built.layer_sets == (0, 1, 0, 2)
    assert len(built.sets) == 3
    assert all(set(kernels) == set(tir_kernels.catalogue.KERNELS) for kernels in built.sets)
    with pytest.raises(ValueError, match="3 kernel sets"):
        _ = built.kernels


def test_layers_with_a_window_have_kernels_of_their_own(cache_dir):
    local = RopeConfig(theta=1e6)
    layers = [LayerSpec(), *(LayerSpec("mha_sliding", window) for window in (8, 9)),
              LayerSpec("mha_sliding", 8, rope=local)]  # fmt: skip
    built = build_kernels(make_config(num_layers=4, layers=layers))
    assert built.layer_sets == (0, 1, 1, 2)  # one kernel for all windows


@pytest.mark.parametrize("layer", [LayerSpec(), LayerSpec("mha_sliding", 8)], ids=["all", "window"])
def test_kernels_of_another_kind_are_not_compiled(layer):
    config = make_config(layers=[layer], num_layers=1).resolved()
    names = tir_kernels.kernel_names(build.kernel_spec(config, config.layers[0], resolve_target()))
    assert ("prefill" in names, "prefill_sliding" in names) == (
        not layer.window,
        bool(layer.window),
    )
    assert ("decode" in names, "decode_sliding" in names) == (not layer.window, bool(layer.window))


def test_capacities_do_not_matter(cache_dir):
    build_kernels(make_config())
    build_kernels(
        make_config(num_layers=9, max_total_tokens=128, max_num_sequences=1, prefill_chunk_size=7)
    )
    assert len(list(cache_dir.glob("*.so"))) == 1
    build_kernels(make_config(page_size=4))
    assert len(list(cache_dir.glob("*.so"))) == 2


def test_unknown_kernel_is_named():
    with pytest.raises(ValueError, match="no kernel 'mergee'; there are .*merge"):
        tir_kernels.build_kernel("mergee", tir_kernels.KernelSpec(4, 2, 64, 64))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_all_kernels_build_in_one_module(tmp_path, monkeypatch, dtype):
    monkeypatch.setenv("TVM_PAGEDKV_CACHE", str(tmp_path))
    config = make_config(dtype=dtype, rope=RopeConfig(scaling=LONGROPE))
    resolved = config.resolved()
    spec = build.kernel_spec(resolved, resolved.layers[0], resolve_target())
    with fast_compilation.unoptimized():
        assert set(build_kernels(config).kernels) == set(tir_kernels.kernel_names(spec))


# --- files --------------------------------------------------------------------------------------


def test_compiles_once_and_tells_so(cache_dir, capfd):
    lines: list[str] = []
    check_merge(build_kernels(make_config(), progress=lines.append).kernels)
    assert len(lines) == 2
    assert "4/2 heads of 32" in lines[0]
    check_merge(build_kernels(make_config(), progress=lines.append).kernels)
    assert len(lines) == 2
    assert len(list(cache_dir.glob("*.so"))) == 1
    build_kernels(make_config(page_size=2))  # no callback: silent
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"\x7fELF",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    ],
    ids=["empty", "header", "half", "short", "flipped-bit"],
)
def test_a_damaged_file_is_built_anew(cache_dir, damage):
    cache_dir.mkdir(mode=0o700)
    build_kernels(make_config(page_size=8))
    (path,) = cache_dir.glob("*.so")
    whole = path.read_bytes()
    path.unlink()  # not written over: this process has it mapped
    path.write_bytes(damage(whole))
    lines: list[str] = []
    check_merge(build_kernels(make_config(page_size=8), progress=lines.append).kernels)
    assert len(lines) == 2
    assert [p.name for p in cache_dir.glob("*.so")] == [path.name]


@pytest.mark.slow
def test_two_processes_at_once(cache_dir, monkeypatch):
    code = (
        "import tir_kernels\n"
        "from tvm_pagedkv import KVCacheConfig, LayerSpec, RopeConfig\n"
        "from tvm_pagedkv.compiler.build import build_kernels\n"
        "tir_kernels.catalogue.KERNELS = {'merge': tir_kernels.catalogue.KERNELS['merge']}\n"
        f"build_kernels({make_config()!r}).kernels['merge']\n"
    )
    environment = os.environ | {"PYTHONPATH": path_of_children()}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    few = {"merge": tir_kernels.catalogue.KERNELS["merge"]}
    monkeypatch.setattr(tir_kernels.catalogue, "KERNELS", few)
    check_merge(build_kernels(make_config()).kernels)
    assert len(list(cache_dir.glob("*.so"))) == 1


@pytest.mark.parametrize(
    "compiler, message",
    [(None, "no C\\+\\+ compiler .* CXX"), ("/nowhere/g++", "running '/nowhere/g\\+\\+' gave")],
)
def test_a_missing_linker_is_named(cache_dir, monkeypatch, compiler, message):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    with pytest.raises(RuntimeError, match=message):
        build_kernels(make_config())
    assert not list(cache_dir.glob("*.so"))


# --- the map of `pagedkv.create` ------------------------------------------------------------------


def test_config_map(cache_dir):
    rope = RopeConfig(mode="inline", theta=5e5, scale=0.5, scaling=LONGROPE)
    config = make_config(rope=rope, kv_dtype="float16", max_total_tokens=100)
    described = config_map(config.resolved(), build_kernels(config), tvm.cpu())
    factors = described.pop("rope_ext_factors")
    np.testing.assert_array_equal(factors.numpy(), np.repeat([2.0, 1.0], 16))  # long, then short
    layers = described.pop("layers")
    assert described == {
        "layer_indptr": (0, 2),
        "stage": None,
        "max_num_sequences": 32,
        "max_total_tokens": 100,
        "prefill_chunk_size": 2048,
        "page_size": 16,
        "dtype": "float32",
        "kv_dtype": "float16",
        "rope_mode": 2,
        "sliding_window": False,
        "sliding_window_includes_self": False,
        "aux_manager": "auto",
        "share_prefix": True,
        "enable_kv_transfer": False,
    }
    assert layers == 2 * [
        {
            "kind": "mha",
            "window": 0,
            "num_qo_heads": 4,
            "num_kv_heads": 2,
            "qk_head_dim": 32,
            "v_head_dim": 32,
            "rope_mode": 2,
            "rope_theta": 5e5,
            "rope_scale": 0.5,
            "rope_details": '{"original_max_position_embeddings": 4096, "rope_type": "longrope"}',
            "kernel_set": 0,
            "kv_dtype": "float16",
        }
    ]
    plain = config_map(make_config().resolved(), build_kernels(make_config()), tvm.cpu())
    assert "rope_ext_factors" not in plain


def test_what_layers_must_share(cache_dir):
    others = LayerSpec(rope=RopeConfig(scaling=LONGROPE)), LayerSpec(rope=RopeConfig(mode="none"))
    config = make_config(layers=[LayerSpec(), others[0]])
    with pytest.raises(ValueError, match="must have the same longrope factors"):
        config_map(config.resolved(), build_kernels(config), tvm.cpu())
    config = make_config(layers=others)
    described = config_map(config.resolved(), build_kernels(config), tvm.cpu())
    assert described["rope_ext_factors"].shape == (32,)
    assert [layer["rope_mode"] for layer in described["layers"]] == [1, 0]


def test_create(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_PAGEDKV_CACHE", str(tmp_path))
    layers = [LayerSpec(), LayerSpec(rope=RopeConfig(theta=1e6))]
    with fast_compilation.unoptimized(), fast_compilation.when_called():
        cache = tvm_pagedkv.create(make_config(layers=layers))
    assert isinstance(cache, tvm_pagedkv.KVCache)
    cache.add_sequence(0)
    assert cache.sequence_length(0) == 0


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
