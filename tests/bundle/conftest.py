# SPDX-License-Identifier: Apache-2.0
"""A bundle of a few kernels, and a copy of it to damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tvm_pagedkv_lm.cli import command as cli

from ..support.cases.caches.bundle_cases import CONFIG, SECOND


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """A bundle written by the command, and moved since."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["bundle", "--config", str(folder / "config.json"), "--out", str(folder / "new")]
    for cpu in ["native", *SECOND]:
        arguments += ["--cpu", cpu]
    assert cli.main(arguments) == 0
    return (folder / "new").rename(folder / "moved")


@pytest.fixture
def copy(bundle, tmp_path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))
