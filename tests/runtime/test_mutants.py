# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the state of recurrent layers are noticed by its unit tests."""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from ..support.harness.cpp_build import ROOT, needs_cmake, run

pytestmark = [needs_cmake, pytest.mark.slow]

SOURCES = ROOT / "runtime_ext"
TESTS = ("main", "recurrent_states_test", "kv_transfer_test")
CASES = "states *,a hit takes*,kv transfer*"
STATES, PLAN = "state/sequences/recurrent_states", "state/plans/state_plan"
USERS_OF_STATES = (
    f"{STATES}.cc",
    "state/sequences/window_histories.cc",
    *(f"state/prefix_cache/{name}.cc" for name in ("prefix_lookup", "prefix_cache")),
)


class Mutant(NamedTuple):
    """A fault: the file, its text, and what takes the place of the text.

    Parameters
    ----------
    sources : tuple of str
        What to compile for a header.
    """

    file: str
    text: str
    fault: str
    sources: tuple[str, ...] = ()


MUTANTS = {
    # Which state a position is computed from.
    "a partial state taken for a full one": Mutant(
        f"{STATES}.cc",
        "(page + 1) * interval(s) <= states.length",
        "page * interval(s) <= states.length - 1",
    ),
    "a state behind the position": Mutant(
        f"{STATES}.cc",
        "if (length <= text_length) return length;",
        "if (length <= text_length + 1) return std::min(length, text_length);",
    ),
    "a lost state": Mutant(
        f"{STATES}.h",
        "if (n == 0 || has_state(n - 1)) return n * interval;",
        "return n * interval;",
        USERS_OF_STATES,
    ),
    "lost ingredients": Mutant(
        f"{STATES}.h",
        "if (has_ingredients(page - 1)) continue;",
        "if (has_ingredients(page - 1) || page > 0) continue;",
        USERS_OF_STATES,
    ),
    # Pops, forks, and what is given up.
    "a pop keeps a state of dropped positions": Mutant(
        f"{STATES}.cc",
        "states.pages.push_back(taken_back);\n    states.length = length;",
        "states.pages.push_back(taken_back);\n    states.length = text_length;",
    ),
    "a fork takes the state of another position": Mutant(
        f"{STATES}.cc",
        "to.length = length;",
        "to.length = std::min(text_length, from.length);",
    ),
    "a fork shares without an owner": Mutant(
        f"{STATES}.cc",
        "      pool(s).AddOwner(id);\n",
        "",
    ),
    "the state to pop back to is given up": Mutant(
        f"{STATES}.cc",
        "/ interval(s) - 1, 0);\n    const int64_t count",
        "/ interval(s), 0);\n    const int64_t count",
    ),
    "given up states are forgotten": Mutant(
        f"{STATES}.cc",
        "      states.history.Append(states.pages[i], &pool(s));\n",
        "",
    ),
    # A step: replay, pages, aborts.
    "a step without the layer leaves its states": Mutant(
        "state/plans/forward_plan.cc",
        "states.Finish() : states.Abort()",
        "states.Finish() : states.Finish()",
    ),
    "a shared state is overwritten": Mutant(
        f"{PLAN}.cc",
        "run.is_in_place = pool().RefCount(last) == 1;",
        "run.is_in_place = true;",
    ),
    "an aborted step leaves its state": Mutant(
        f"{PLAN}.cc",
        "if (run.is_in_place) {\n      pool()",
        "if (run.is_in_place && interval() < 0) {\n      pool()",
    ),
    "an aborted step takes the shared state along": Mutant(
        f"{PLAN}.cc",
        "states.pages.push_back(run.replaced);",
        "states.pages.push_back(run.replaced), states.length = run.end;",
    ),
    "no states on the way": Mutant(
        f"{PLAN}.h",
        "end = std::min(run.end, (page + 1) * interval());",
        "end = run.end + 0 * page;",
        ("state/plans/plan_arrays.cc",),
    ),
    "each segment begins with the first state": Mutant(
        f"{PLAN}.h",
        "    last = target;\n",
        "",
        ("state/plans/plan_arrays.cc",),
    ),
    "a replay begins with zeros": Mutant(
        f"{PLAN}.h",
        "int32_t last = run.begin > 0 ?",
        "int32_t last = run.begin > 8 ?",
        ("state/plans/plan_arrays.cc",),
    ),
    "replayed rows have outputs": Mutant(
        "state/plans/plan_arrays.cc",
        "row < 0 ? -1 : item.first_row + row",
        "item.first_row + (row < 0 ? 0 : row)",
    ),
    # Token trees.
    "nodes that branch have no state of their own": Mutant(
        f"{PLAN}.cc",
        "parent >= 0 && num_children[parent] == 1",
        "parent >= 0 && num_children[parent] > 0",
    ),
    "a branch begins with the committed state": Mutant(
        f"{PLAN}.h",
        "branch.read_page < 0 ? last : scratch[branch.read_page]",
        "branch.read_page < 0 ? last : last",
        ("state/plans/plan_arrays.cc",),
    ),
    "the state before a branch is overwritten": Mutant(
        f"{PLAN}.cc",
        "branch.read_page + (is_last ? 0 : 1);",
        "branch.read_page;",
    ),
    "the state before a branch is overwritten by the first child": Mutant(
        f"{PLAN}.cc",
        "child == next.children[0]",
        "child == next.children.back()",
    ),
    "the states of nodes are kept": Mutant(
        "state/plans/forward_plan.cc",
        "has_trees() ? item.past_length - item.num_earlier_nodes\n",
        "has_trees() ? item.past_length\n",
    ),
    "a commit moves no rows": Mutant(
        "state/plans/commit_plan.cc",
        "first + item.path[i]",
        "first + i",
    ),
    # Prefix hits and transfers.
    "a hit without its ingredients": Mutant(
        "state/prefix_cache/prefix_lookup.cc",
        "         IsKnown(geometry_->PageOf(first - 1), ingredients) &&\n",
        "",
    ),
    "a state is sent before it is computed": Mutant(
        "state/table/sends.cc",
        "< 0) end = position - 1;",
        "< 0) end = position;",
    ),
    "a receive drops ingredients that are needed": Mutant(
        "state/table/receives.cc",
        "    first = std::min(first, geometry.PageOf(",
        "    first = std::max(first, geometry.PageOf(",
    ),
    "a cancelled receive leaves its state": Mutant(
        f"{STATES}.cc",
        "    sequence->states[s] = std::move(*old);\n",
        "    Release(&*old, s);\n",
    ),
}


def compiled(source: Path, target: Path, *includes: Path) -> Path:
    flags = [f"-I{folder}" for folder in (*includes, SOURCES, SOURCES / "third_party")]
    run("g++", "-std=c++17", "-O1", *flags, "-c", str(source), "-o", str(target))
    return target


class Binary:
    """The objects of the core and of its tests, and programs with some of them replaced."""

    def __init__(self, folder: Path):
        self.folder = folder
        listed = (ROOT / "CMakeLists.txt").read_text()
        core = re.findall(r"runtime_ext/((?:state|base)/.*\.cc)", listed)
        files = [*dict.fromkeys(core), *(f"tests/{name}.cc" for name in TESTS)]
        self.objects = {file: folder / f"{i}.o" for i, file in enumerate(files)}
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 4)) as pool:
            list(pool.map(lambda f: compiled(SOURCES / f, self.objects[f]), self.objects))

    def run(self, mutant: Mutant | None) -> subprocess.CompletedProcess:
        """Return the result of the tests."""
        objects = dict(self.objects)
        if mutant is not None:
            text = (SOURCES / mutant.file).read_text()
            assert text.count(mutant.text) == 1, f"{mutant.file} has changed: {mutant.text!r}"
            faulty = self.folder / "faulty" / mutant.file
            faulty.parent.mkdir(parents=True, exist_ok=True)
            faulty.write_text(text.replace(mutant.text, mutant.fault))
            for name in mutant.sources or (mutant.file,):
                source = SOURCES / name if mutant.sources else faulty
                target = self.folder / f"faulty_{Path(name).stem}.o"
                objects[name] = compiled(source, target, self.folder / "faulty")
            faulty.unlink()
        program = self.folder / "tests"
        run("g++", *map(str, objects.values()), "-o", str(program), "-lpthread")
        command = [str(program), f"-tc={CASES}", "--abort-after=1"]
        return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def binary(tmp_path_factory) -> Binary:
    return Binary(tmp_path_factory.mktemp("mutants"))


def test_without_a_fault_nothing_is_found(binary):
    result = binary.run(None)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(binary, name):
    result = binary.run(MUTANTS[name])
    assert result.returncode != 0, "no test has noticed it"


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
