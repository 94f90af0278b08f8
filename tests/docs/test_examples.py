# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/ run as their first lines say."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from ..support.harness.selections import with_slow
from .documents import ROOT, blocks_of

EXAMPLES = ROOT / "examples"
NO_OLD_NAMES = ("-W", "error::DeprecationWarning:__main__")
# What each prints when it has done what it shows.
PRINTS = {
    "relax_model.py": r"\[84, 104, 101(, \d+){8}\] in 10 positions",
    "prefix_reuse.py": r"([1-9]\d*) of \d+ pages in use are shared",
    "prefix_cache.py": r"\b[12]\d\d of \d+ tokens were not computed",
    "agents.py": r"the agent goes on: [1-9]\d\d of \d+ tokens were there",
    "chat_turns.py": r"turn 5: reused 3\d\d of 4\d\d tokens; first token after \d+ ms",
    "quantized.py": r"int8: 1/3\.[4-9] of the bytes, divergence \d\.\de-\d+, \d+ tokens",
    "speculative.py": r"6\d tokens in [1-3]\d steps",  # fewer than one for each token
    "disaggregated.py": r"a single process writes the same",
}


def test_every_example_is_listed():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTS)


@pytest.mark.parametrize("name", with_slow(PRINTS, "prefix_reuse.py", "quantized.py"))
def test_example(name, tmp_path):
    docstring = (EXAMPLES / name).read_text(encoding="utf-8").split('"""')[1]
    (line,) = re.findall(rf"^python examples/{name}.*", docstring, re.MULTILINE)
    arguments = shlex.split(line)[2:]
    if name == "disaggregated.py":
        arguments += ["--check", "--max-tokens", "12"]
    result = subprocess.run(
        [sys.executable, *NO_OLD_NAMES, str(EXAMPLES / name), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(PRINTS[name], result.stdout), result.stdout


def test_the_page_about_relax_models_shows_the_example():
    page = ROOT / "docs" / "relax-models.md"
    program = (EXAMPLES / "relax_model.py").read_text(encoding="utf-8")
    blocks = [block for block in blocks_of(page) if block.title.endswith("relax_model.py")]
    assert len(blocks) >= 3
    for block in blocks:
        assert block.code in program, f"{block.where} differs from the example"


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
