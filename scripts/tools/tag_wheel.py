#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Lets a wheel ask for the series of apache-tvm that it was built for: python tag_wheel.py WHEEL

The series becomes the wheel's build tag too. The old file is removed; prints the path of the new.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path


def run(*command: str | Path) -> None:
    """Run a command, whose output is printed if it fails only."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def tag(wheel: Path) -> Path:
    """Narrow the requirement of a wheel and name the series in its file name."""
    major, minor = (int(part) for part in version("apache-tvm").split(".")[:2])
    series = f"{major}.{minor}"
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "wheel", "unpack", "--dest", folder, wheel)
        (unpacked,) = Path(folder).iterdir()
        (metadata,) = unpacked.glob("*.dist-info/METADATA")
        text, count = re.subn(
            r"^Requires-Dist: apache-tvm[<>=].*$",
            f"Requires-Dist: apache-tvm>={series},<{major}.{minor + 1}",
            metadata.read_text(),
            flags=re.MULTILINE,
        )
        assert count == 1, f"{count} requirements of apache-tvm"
        metadata.write_text(text)
        build = f"{major}{minor:02}"
        run(
            sys.executable,
            "-m",
            "wheel",
            "pack",
            "--dest-dir",
            wheel.parent,
            "--build-number",
            build,
            unpacked,
        )
    wheel.unlink()
    name, number, rest = wheel.name.split("-", 2)
    return wheel.with_name(f"{name}-{number}-{build}-{rest}")


if __name__ == "__main__":
    print(tag(Path(sys.argv[1])))
