# SPDX-License-Identifier: Apache-2.0
"""The quick selection: `-m quick` reads the files that have tests of it, and no others."""

from __future__ import annotations

from pathlib import Path

from ..support.harness.selections import QUICK, may_have_quick

ROOT = Path(__file__).resolve().parents[2]


def test_every_entry_names_tests():
    for entry in QUICK:
        path, _, function = entry.partition("::")
        files = list(ROOT.glob(f"{path.rstrip('/')}*"))
        assert files, entry
        assert not function or f"def {function}" in files[0].read_text(), entry


def test_folders_on_the_way_are_read():
    assert may_have_quick("tests") and may_have_quick("tests/kernels")
    assert not may_have_quick("tests/cuda/test_cuda_random.py")


def test_files_with_some_quick_tests_are_read():
    assert may_have_quick("tests/kernels/test_attention_kernels.py")
    assert may_have_quick("tests/drop_in/test_engine_calls.py")
    assert may_have_quick("tests/page/test_page_layer.py")
    assert not may_have_quick("tests/kernels/test_rope.py")


def test_other_files_are_not_imported(pytestconfig, tmp_path, monkeypatch):
    plugin = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    for expression, is_ignored in (("quick", True), ("not slow", None), ("", None)):
        monkeypatch.setattr(pytestconfig.option, "markexpr", expression)
        path = ROOT / "tests" / "kernels" / "test_rope.py"
        assert plugin.pytest_ignore_collect(path, pytestconfig) is is_ignored
        quick = ROOT / "tests" / "kernels" / "test_page_kernels.py"
        assert plugin.pytest_ignore_collect(quick, pytestconfig) is None
        assert plugin.pytest_ignore_collect(tmp_path, pytestconfig) is None


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
