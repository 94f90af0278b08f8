# SPDX-License-Identifier: Apache-2.0
"""mlc-llm's compiler over our cache, with a stand-in that makes mlc-llm's calls."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
import tvm
import tvm_ffi
from tvm import relax

import tvm_pagedkv as pkv
import tvm_pagedkv.mlc
from tvm_pagedkv.distributed import disco

from .. import reference
from ..relax.test_frontend import HEAD_DIM, NUM_LAYERS, check_fused
from ..support.cases.models.mlc_cases import compiled, created, mlc_llm  # noqa: F401  (a fixture)

ROPE = reference.Rope(rotary_dim=HEAD_DIM)


def test_a_model_that_mlc_llm_compiles_has_our_cache(mlc_llm):  # noqa: F811
    pkv.mlc.install()
    machine, metadata = compiled()
    cache = created(machine)
    check_fused(machine, cache, ROPE, "normal")
    assert isinstance(cache, pkv.KVCache)
    cache.check_integrity()
    assert metadata["flashinfer"] is False


@pytest.mark.parametrize("types", [None, ["full_attention", "sliding_attention"]])
def test_gemma2_has_its_softcap_and_its_windows(mlc_llm, types):  # noqa: F811
    from mlc_llm.model.gemma2.gemma2_model import Gemma2Config

    pkv.mlc.install()
    fields = {"attn_logit_softcapping": 0.5, "sliding_window": 7, "max_position_embeddings": 512}
    config = Gemma2Config.from_dict(fields | ({} if types is None else {"layer_types": types}))
    assert config.context_window_size == 512
    machine, _ = compiled("gemma2", config)
    windows = [7, None] if types is None else [None, 7]
    check_fused(machine, created(machine), ROPE, "normal", windows, softcap=0.5)


def test_gemma3_has_windows_in_its_layers_and_not_in_its_sequences(mlc_llm):  # noqa: F811
    from mlc_llm.model.gemma3.gemma3_model import Gemma3Config

    pkv.mlc.install()
    config = Gemma3Config.from_dict({"sliding_window": 7})
    assert config.sliding_window_size == -1
    machine, _ = compiled("gemma3", config, kinds=["mha_sliding", "mha"])
    # Of two layers neither is the sixth one.
    check_fused(machine, created(machine), ROPE, "normal", [7] * NUM_LAYERS)


def test_a_pipeline_without_a_configuration_warns(mlc_llm):  # noqa: F811
    pkv.mlc.install()
    pipeline = importlib.import_module("mlc_llm.compiler_pass.pipeline")
    metadata = {"model_type": "gemma2"}
    with pytest.warns(RuntimeWarning, match="compiling"):
        pipeline.DispatchKVCacheCreation(tvm.target.Target("llvm"), True, metadata)
    with pkv.mlc.compiling("gemma2", object()):
        pipeline.DispatchKVCacheCreation(tvm.target.Target("llvm"), True, metadata)


def test_flashinfer_comes_only_when_asked_for(mlc_llm):  # noqa: F811
    pkv.mlc.install()
    assert compiled(flashinfer=True)[1]["flashinfer"] is False
    pkv.mlc.install(flashinfer=True)
    assert compiled(flashinfer=True)[1]["flashinfer"] is True
    assert compiled(flashinfer=False)[1]["flashinfer"] is False


def test_rope_that_has_no_kernels_keeps_those_of_tvm(mlc_llm):  # noqa: F811
    from mlc_llm.compiler_pass import dispatch_kv_cache_creation as dispatch

    pkv.mlc.install()
    asked = {}

    class Stock:
        def __init__(self, **arguments):
            asked.update(arguments)

    create = dispatch.kv_cache.TIRPagedKVCache
    tvm_names = sys.modules[create.__module__].tvm_kv_cache
    arguments = dict.fromkeys(sys.modules[create.__module__]._ARGUMENTS)
    arguments["rope_scaling"] = {"rope_type": "gptj"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tvm_names, "TIRPagedKVCache", Stock)
        with pytest.warns(RuntimeWarning, match="'gptj'"):
            create(**arguments)
    assert asked == arguments


def test_other_arguments_than_expected_are_named(mlc_llm):  # noqa: F811
    from mlc_llm.compiler_pass import dispatch_kv_cache_creation as dispatch

    pkv.mlc.install()
    create = dispatch.kv_cache.TIRPagedKVCache
    arguments = dict.fromkeys(sys.modules[create.__module__]._ARGUMENTS)
    del arguments["dtype"]
    with pytest.raises(TypeError, match="dtype, head_sink"):
        create(**arguments, head_sink=1)


def _names() -> dict[str, object]:
    """All that an installation may replace."""
    found = {
        f"{module}.{name}": value
        for module in [name for name in sys.modules if name.startswith("mlc_llm.")]
        for name, value in vars(sys.modules[module]).items()
    }
    found |= {f"relax.{name}": value for name, value in vars(relax).items()}
    found |= {f"Var.{name}": value for name, value in vars(relax.Var).items()}
    for kind in ("gemma2", "gemma3"):
        config = getattr(sys.modules[f"mlc_llm.model.{kind}.{kind}_model"], f"{kind.title()}Config")
        found |= {f"{kind}.{name}": value for name, value in vars(config).items()}
    base = sys.modules["mlc_llm.support.config"].ConfigBase
    found |= {f"ConfigBase.{name}": value for name, value in vars(base).items()}
    return found


def test_uninstall_puts_everything_back(mlc_llm):  # noqa: F811
    pkv.mlc.install()  # imports all modules
    pkv.mlc.uninstall()
    before = _names()
    assert not hasattr(relax, "StringImm") or tvm.__version__.split(".")[:2] != ["0", "27"]
    pkv.mlc.install()
    changed = {name for name, value in _names().items() if before.get(name) is not value}
    assert {
        "mlc_llm.compiler_pass.dispatch_kv_cache_creation.kv_cache",
        "mlc_llm.compiler_pass.pipeline.DispatchKVCacheCreation",
        "mlc_llm.interface.compile._compile",
        "mlc_llm.interface.jit.subprocess",
        "gemma2.__post_init__",
    } <= changed
    pkv.mlc.install(flashinfer=True)
    pkv.mlc.uninstall()
    pkv.mlc.uninstall()
    after = _names()
    assert {name for name in before if after.get(name) is not before[name]} == set()
    assert after.keys() == before.keys()


def test_without_mlc_llm_an_error_says_so():
    with pytest.raises(ImportError, match="mlc_llm of mlc-llm, which is not installed"):
        pkv.mlc.install()
    pkv.mlc.uninstall()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("compiler_pass.dispatch_kv_cache_creation", "kv_cache"),
        ("compiler_pass.pipeline", "DispatchKVCacheCreation"),
        ("interface.compile", "_compile"),
        ("interface.jit", "MLC_LLM_HOME"),
    ],
)
def test_a_missing_part_is_named_and_nothing_stays_replaced(mlc_llm, monkeypatch, module, name):  # noqa: F811
    pkv.mlc.install()
    pkv.mlc.uninstall()
    before = _names()
    monkeypatch.delattr(f"mlc_llm.{module}.{name}")
    missing = re.escape(f"mlc_llm.{module}.{name}, which mlc-llm 0.0.standin in")
    with pytest.raises(ImportError, match=missing):
        pkv.mlc.install()
    monkeypatch.undo()
    after = _names()
    assert {name for name in before if after.get(name) is not before[name]} == set()


def test_a_missing_module_is_named(mlc_llm, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "mlc_llm.interface.jit", None)
    with pytest.raises(ImportError, match="the module mlc_llm.interface.jit"):
        pkv.mlc.install()


def test_compilers_that_mlc_llm_starts_use_our_cache(mlc_llm):  # noqa: F811
    pkv.mlc.install()
    from mlc_llm.interface import jit

    library = jit.jit("settings")
    assert library.parent.parent == mlc_llm / "tvm_pagedkv"
    assert library.read_text() == "tvm_pagedkv.mlc.dispatch compile settings\n"
    pkv.mlc.install(flashinfer=True)
    assert jit.MLC_LLM_HOME == mlc_llm / "tvm_pagedkv_flashinfer"
    pkv.mlc.uninstall()
    library = jit.jit("settings")
    assert library.parent.parent == mlc_llm
    assert library.read_text().startswith("tvm.relax.frontend.nn.llm.kv_cache ")


def test_worker_processes_have_the_library(mlc_llm):  # noqa: F811
    pkv.mlc.install()
    tvm_disco = disco.load_disco()
    session = tvm_disco.ProcessSession(2, entrypoint="mlc_llm.cli.worker")
    library = session.get_global_func("pagedkv.library")()
    versions = [library.debug_get_from_remote(worker)["version"] for worker in range(2)]
    assert versions == [pkv.__version__] * 2


def test_worker_processes_are_as_before_after_uninstall(mlc_llm):  # noqa: F811
    name = "runtime.disco.create_process_pool"
    disco.load_disco()
    before = tvm_ffi.get_global_func(name)
    pkv.mlc.install()
    assert not tvm_ffi.get_global_func(name).same_as(before)
    pkv.mlc.uninstall()
    assert tvm_ffi.get_global_func(name).same_as(before)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
