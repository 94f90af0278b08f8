# SPDX-License-Identifier: Apache-2.0
"""A C++ project finds the package with `find_package`, and its header calls a cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tvm_pagedkv as pkv
from tvm_pagedkv.config.__main__ import main

ROOT = Path(__file__).parents[2]
CONSUMER = ROOT / "tests" / "support" / "harness" / "cpp_consumer"


def _run(*command: str | Path) -> str:
    environment = os.environ | {"TVM_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _printed(capsys, option: str) -> Path:
    main([option])
    return Path(capsys.readouterr().out.rstrip("\n"))


def test_the_printed_paths_exist(capsys):
    assert (_printed(capsys, "--cmakedir") / "tvm_pagedkv-config.cmake").is_file()
    assert (_printed(capsys, "--includedir") / "tvm_pagedkv" / "kv_cache.h").is_file()
    assert _printed(capsys, "--library").is_file()
    with pytest.raises(SystemExit):
        main([])


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_a_project_that_finds_the_package(tmp_path, capsys):
    config = pkv.KVCacheConfig(
        num_layers=2, num_qo_heads=4, num_kv_heads=2, qk_head_dim=32, dtype="float32"
    )
    pkv.write_bundle(config, tmp_path / "bundle")
    _run(
        "cmake", "-S", CONSUMER, "-B", tmp_path / "build",
        f"-Dtvm_pagedkv_ROOT={_printed(capsys, '--cmakedir')}",
        f"-DPython_EXECUTABLE={sys.executable}",
    )  # fmt: skip
    _run("cmake", "--build", tmp_path / "build")
    lines = _run(tmp_path / "build" / "consumer", tmp_path / "bundle").splitlines()
    position, o, lengths, kind, empty = lines
    assert position == "position 0"
    assert o == f"o {(193 % 17):g} {(193 % 17):g}"  # row 6 of 32 columns, column 1
    assert lengths == "lengths 1 2"
    assert kind in ("KeyError", "ValueError")
    assert empty == "empty 1, pages 4"


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
