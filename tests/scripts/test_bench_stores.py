# SPDX-License-Identifier: Apache-2.0
"""The benchmark of stores: that it runs, and that its shares are those of its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ..support.emulators.store_servers import valkey_server

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "bench_stores.py"


def test_each_store_is_measured_beside_its_medium(tmp_path):
    path, plot = tmp_path / "records.json", tmp_path / "plot.svg"
    arguments = ["--kib", "64", "256", "--mib", "16", "--rounds", "2", "--folder", str(tmp_path)]
    with valkey_server(tmp_path) as server:
        arguments += ["--valkey", f"valkey://127.0.0.1:{server.port}"]
        command = [sys.executable, str(SCRIPT), *arguments]
        command += ["--json", str(path), "--plot", str(plot)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())["records"]
    speeds = {
        (r["peer"], r["value_bytes"], r["operation"]): (r["gb_per_s"], r["share"]) for r in records
    }
    disk = {(peer, name) for peer in ("file", "DiskStore") for name in ("put", "cold", "warm")}
    net = {(peer, name) for peer in ("loopback", "ValkeyStore") for name in ("put", "warm")}
    assert set(speeds) == {
        (peer, size << 10, name) for size in (64, 256) for peer, name in disk | net
    }
    for (peer, size, name), (speed, share) in speeds.items():
        under = "file" if peer in ("file", "DiskStore") else "loopback"
        assert speed > 0
        assert abs(share - speed / speeds[under, size, name][0]) < 1e-6 * share
        assert peer in done.stdout
    assert plot.read_bytes().startswith(b"<?xml")
    left = {child.name for child in tmp_path.iterdir()}
    assert left == {"records.json", "plot.svg", "valkey.log"}


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
