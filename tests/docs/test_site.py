# SPDX-License-Identifier: Apache-2.0
"""The pages build to a site without warnings, and the site needs nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from .documents import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "true"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_every_page_is_there(site):
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.name).with_suffix(".html").is_file()


def test_nothing_is_loaded_from_elsewhere(site):
    """Links may lead away; scripts, styles, fonts and pictures may not."""
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|img)[^>]*src="https?:', text), page.name
        assert not re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="https?:', text), page.name


def test_the_reference_has_every_public_name(site):
    import tvm_pagedkv as pkv

    text = (site / "api.html").read_text(encoding="utf-8")
    for name in set(pkv.__all__) - {"__version__"}:  # which is no class or function
        assert f'id="tvm_pagedkv.{name}"' in text, name


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
