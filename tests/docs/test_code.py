# SPDX-License-Identifier: Apache-2.0
"""Python code of the documents runs, and prints what the documents say."""

from __future__ import annotations

import contextlib
import io
import warnings

import pytest

from ..support.cases.models.mlc_cases import mlc_llm  # noqa: F401  (a fixture)
from .documents import PAGES, blocks_of, name_of

NEEDS = {"docs/mlc-llm.md": "mlc_llm"}  # fixtures that stand in for what a page's code imports
WITH_CODE = [page for page in PAGES if any(b.language == "python" for b in blocks_of(page))]


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch, request):
    """The blocks of a page are one program, run in an empty folder, without deprecated names."""
    monkeypatch.chdir(tmp_path)
    if name_of(page) in NEEDS:
        request.getfixturevalue(NEEDS[name_of(page)])
    names: dict = {"__name__": "__main__"}
    printed = ""
    for block in blocks_of(page):
        if block.is_output:
            assert printed.split() == block.code.split(), f"{block.where} shows other output"
        if block.language != "python":
            continue
        # Lines of code keep their numbers in the page, for tracebacks.
        program = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        if block.reason_not_to_run:
            print(f"{block.where} is not run: {block.reason_not_to_run}")
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            exec(program, names)
        printed = out.getvalue()


def test_every_page_with_code_has_some_that_runs():
    """A page whose blocks are all marked would pass whatever it says."""
    for page in WITH_CODE:
        blocks = [block for block in blocks_of(page) if block.language == "python"]
        assert any(not block.reason_not_to_run for block in blocks), name_of(page)


def test_output_follows_code_that_runs():
    for page in PAGES:
        is_run = False
        for block in blocks_of(page):
            assert is_run or not block.is_output, f"{block.where} shows output of nothing"
            if block.language == "python":
                is_run = not block.reason_not_to_run


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
