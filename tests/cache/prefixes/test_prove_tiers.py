# SPDX-License-Identifier: Apache-2.0
"""A short run of scripts/tools/prove_tiers.py: kills, jumps of clocks and damage below a cache."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys

import pytest

from ...support.emulators.store_servers import valkey_server
from ...support.harness.cpp_build import ROOT


def prove(folder, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "tools" / "prove_tiers.py"), *arguments]
    command += ["--folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def count(output: str, name: str) -> int:
    return int(re.findall(rf"(\d+) {name}", output)[-1])


def test_no_page_is_wrong(tmp_path):
    seed = str(secrets.randbelow(2**32))
    print("seed", seed)
    result = prove(tmp_path, "--steps", "1500", "--seed", seed)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no page was wrong" in result.stdout
    assert count(result.stdout, "steps") >= 1500
    for name in ("pool_tokens", "host_tokens", "store_tokens"):
        assert count(result.stdout, name) > 0


def test_wrong_rows_of_another_process_are_found(tmp_path):
    result = prove(tmp_path, "--steps", "20000", "--seed", "1", "--liars")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "has wrong rows at positions" in result.stdout


@pytest.mark.slow
def test_no_page_is_wrong_with_a_server_below(tmp_path):
    with valkey_server(tmp_path, "2mb") as server:
        result = prove(
            tmp_path, "--steps", "20000", "--valkey", f"valkey://127.0.0.1:{server.port}"
        )
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("processes", "kills", "jumps", "store_tokens"):
        assert count(result.stdout, name) > 0, result.stdout
    faults = ("set_store_clock", "change_value", "drop_connections", "drop_values")
    assert sum(count(result.stdout, name) for name in faults) > 0, result.stdout


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
