# SPDX-License-Identifier: Apache-2.0
"""What docs/sequences.md says happens when its code runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "sequences.md"


def test_the_example(capsys):
    text = PAGE.read_text(encoding="utf-8")
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    (shown,) = re.findall(r"```\n(cannot fork.*?)```", text, re.DOTALL)
    assert capsys.readouterr().out.split() == shown.split()
    names["cache"].check_integrity()
