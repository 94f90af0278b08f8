# SPDX-License-Identifier: Apache-2.0
"""Links, paths and command lines of the documents are real."""

from __future__ import annotations

import contextlib
import io
import re
import shlex

import pytest

from tir_kernels import KernelSpec
from tir_kernels.catalogue import KERNELS
from tvm_pagedkv_lm.cli import main

from .documents import PAGES, ROOT, anchors_of, blocks_of, name_of, prose_of

_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
_REFERENCE = re.compile(r"\]\[([^\]]+)\]")
_DEFINITION = re.compile(r"^\[([^\]]+)\]: (\S+)$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
# Data, tests and what only programs around the runtime have.
NOT_COMPONENTS = {
    *("tiny", "share", "include", "bench", "example", "fuzz", "tests", "third_party"),
}
_PATH = re.compile(r"`((?:tests|scripts|tvm_pagedkv|tir_kernels|runtime_ext|docs)/[\w./\-]*)`")


def _is_relative(target: str) -> bool:
    return "://" not in target and not target.startswith("mailto:")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in (a or b for a, b in _LINK.findall(prose_of(page))):
        if not _is_relative(target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        assert file.is_relative_to(ROOT), f"{name_of(page)} links to {target}, outside"
        if anchor:
            assert anchor in anchors_of(file), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sources_are_defined_once_and_pinned(page):
    """Links by reference, ``[text][name]``, lead to files at a commit or a release."""
    text = _CODE.sub("", prose_of(page))
    names = [name for name, _ in _DEFINITION.findall(text)]
    assert len(names) == len(set(names)), f"{name_of(page)} defines a source twice"
    assert set(_REFERENCE.findall(text)) == set(names), name_of(page)
    for name, target in _DEFINITION.findall(text):
        assert not re.search(r"/(?:blob|tree)/(?:main|master|HEAD)/", target), name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page):
    for path in _PATH.findall(prose_of(page)):
        assert (ROOT / path).exists(), f"{name_of(page)} names {path}"


def _bare_lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_excerpts_are_in_the_files_that_they_name():
    """Blocks titled ``name in path`` show a part of the file, indentation aside."""
    excerpts = [b for page in PAGES for b in blocks_of(page) if " in tir_kernels/" in b.title]
    assert excerpts
    for block in excerpts:
        source = ROOT / block.title.split(" in ")[1]
        assert _bare_lines(block.code) in _bare_lines(source.read_text()), block.where


def test_the_tree_of_folders_is_complete():
    """architecture.md names every folder of the packages, and nothing that is not there."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package, named = "", set()
    for line in text.split("```")[1].splitlines():
        if line and not line.startswith(" "):
            package = line.split()[0]
        elif re.match(r"  \S", line):
            names = line.strip().split("  ")[0]
            named |= {package + name for name in re.findall(r"\w+/|\w+\.py", names)}
    missing = {name for name in named if not (ROOT / name).exists()}
    assert not missing, "architecture.md names what is not there"
    packages = {name.split("/")[0] for name in named}
    assert packages == {"tvm_pagedkv", "tvm_pagedkv_lm", "tir_kernels", "runtime_ext"}
    folders = {
        f"{path.relative_to(ROOT)}/"
        for name in packages
        for path in (ROOT / name).iterdir()
        if path.is_dir() and not path.name.startswith((".", "__"))
    }
    assert not {f for f in folders - named if f.split("/")[1] not in NOT_COMPONENTS}


def test_the_table_of_kernels_is_complete():
    text = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
    table = text.split("| kernel | does |")[1].split("\n\n")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    of_attention = {name for name, k in KERNELS.items() if KernelSpec in k.specs}
    assert set(re.findall(r"`(\w+)`", " ".join(first_cells))) == of_attention


def _commands():
    """Command lines of all shell blocks: where they are, and their words."""
    for page in PAGES:
        for block in blocks_of(page):
            if block.language == "bash":
                for line in block.code.replace("\\\n", " ").splitlines():
                    words = shlex.split(line, comments=True)
                    if words:
                        yield block.where, words


def _help(arguments: list[str]) -> str:
    """What ``tvm-pagedkv ... --help`` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0, f"no such command: tvm-pagedkv {' '.join(arguments)}"
    return out.getvalue()


def _options(words: list[str]) -> list[str]:
    return [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]


def test_command_lines_have_options_that_exist():
    num_checked = 0
    for where, words in _commands():
        if words[0] in ("scripts/generate.sh", "tvm-pagedkv"):
            words = words[1:] if words[0] == "tvm-pagedkv" else ["generate", *words[1:]]
            text = _help(words[:1])
        else:
            script = next((word for word in words if word.startswith("scripts/")), None)
            if script is None:
                continue
            assert (ROOT / script).is_file(), f"{where} calls {script}"
            words = words[words.index(script) + 1 :]
            text = (ROOT / script).read_text(encoding="utf-8")
            if script == "scripts/test.sh":  # which passes what it does not know to pytest
                continue
        for option in _options(words):
            num_checked += 1
            found = re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text)
            assert found, f"{where}: no option {option}"
    assert num_checked > 20  # the documents have many more; none would mean that none is found


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
