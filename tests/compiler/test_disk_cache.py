# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled files: several processes, other users, killed builds, sizes, keys."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from tvm_pagedkv.compiler import cache_folder, disk_cache
from tvm_pagedkv.compiler.cuda import library as cuda_library
from tvm_pagedkv.compiler.disk_cache import code_versions, sealed_file

from ..support.harness.fast_compilation import path_of_children
from ..support.harness.in_child import failures

DAY = 24 * 3600
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """The path of a folder that does not exist yet, within reach of every user."""
    above = Path(tempfile.mkdtemp(prefix="cache-test-"))
    above.chmod(0o755)
    monkeypatch.setenv("TVM_PAGEDKV_CACHE", str(above / "cache"))
    monkeypatch.setattr(cache_folder, "_warned", {})
    monkeypatch.setattr(cache_folder, "_private_folders", {})
    yield above / "cache"
    shutil.rmtree(above)


class Build:
    """Writes a file, and counts in another one how often, whichever process does."""

    def __init__(self, folder: Path, content: bytes = b"content", seconds: float = 0):
        self.log, self.content, self.seconds = folder.with_name("log"), content, seconds

    def __call__(self, path: Path) -> None:
        with self.log.open("a") as log:
            log.write("built\n")
        path.with_suffix(".scratch").write_bytes(b"half")
        time.sleep(self.seconds)
        path.write_bytes(self.content)

    @property
    def count(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def content(path: Path) -> bytes:
    return path.read_bytes()[: -disk_cache._DIGEST_BYTES]


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.iterdir()}


def check_private(folder: Path, warning: str) -> None:
    """A file is built once for this process, outside `folder`, with one warning."""
    build = Build(folder)
    with pytest.warns(RuntimeWarning, match=warning) as caught:
        paths = {sealed_file(["key"], ".so", build) for _ in range(3)}
        other = sealed_file(["other"], ".so", build)
    assert len(caught) == 1
    assert build.count == 2
    (path,) = paths
    assert folder not in path.parents
    assert path.parent == other.parent
    assert content(path) == b"content"
    assert path.parent.stat().st_mode & 0o777 == 0o700


# --- processes ----------------------------------------------------------------------------------


def test_files_and_their_folder_are_private(folder):
    path = sealed_file(["key"], ".so", Build(folder))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in folder.iterdir()] == [path.name]
    assert modes(folder) == {0o600}


def test_processes_that_need_one_file_build_it_once(folder):
    build = Build(folder, seconds=0.3)
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                path = sealed_file(["key"], ".so", build)
                status = int(content(path) != b"content")
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert build.count == 1
    assert len(list(folder.iterdir())) == 1


def test_a_build_that_fails_lets_the_next_one_try(folder):
    def fail(path: Path) -> None:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        sealed_file(["key"], ".so", fail)
    assert not list(folder.iterdir())
    assert content(sealed_file(["key"], ".so", Build(folder))) == b"content"


@pytest.mark.parametrize("key", ["the same", "another"])
def test_a_killed_build_leaves_nothing_for_long(folder, key):
    reader, writer = os.pipe()

    def build_for_ever(path: Path) -> None:
        path.with_suffix(".scratch").write_bytes(b"half")
        os.write(writer, b"x")
        signal.pause()

    child = os.fork()
    if child == 0:
        try:
            sealed_file(["the same"], ".so", build_for_ever)
        finally:
            os._exit(1)
    os.read(reader, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader), os.close(writer)
    assert list(folder.glob(".build-*"))
    path = sealed_file([key], ".so", Build(folder))
    assert [p.name for p in folder.iterdir()] == [path.name]


def test_a_running_build_is_not_swept(folder):
    reader, writer = os.pipe()
    is_swept, sweep = os.pipe()

    def build(path: Path) -> None:
        os.write(writer, b"x")
        os.read(is_swept, 1)
        path.write_bytes(b"slow")  # its folder is still there

    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(content(sealed_file(["slow"], ".so", build)) != b"slow")
        finally:
            os._exit(status)
    os.read(reader, 1)
    sealed_file(["quick"], ".so", Build(folder))
    os.write(sweep, b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(folder.iterdir())) == 2
    for end in (reader, writer, is_swept, sweep):
        os.close(end)


# --- trust --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to(folder, mode):
    folder.mkdir()
    trusted = sealed_file(["key"], ".so", Build(folder, b"planted"))
    assert content(trusted) == b"planted"
    Build(folder).log.unlink()
    folder.chmod(mode)
    check_private(folder, f"other users may write to .*cache .mode {mode:o}")
    folder.chmod(0o700)
    assert content(sealed_file(["key"], ".so", Build(folder))) == b"planted"


@needs_root
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_belongs_to_another_user(folder, what):
    path = sealed_file(["key"], ".so", Build(folder, b"planted"))
    Build(folder).log.unlink()
    foreign = folder if what == "folder" else path
    os.chown(foreign, NOBODY, NOBODY)
    with pytest.warns(RuntimeWarning, match=f"{foreign} belongs to user {NOBODY}, .* user 0"):
        found = sealed_file(["key"], ".so", Build(folder))
    assert content(found) == b"content"
    assert found.parent != folder


@needs_root
def test_another_user_loads_what_root_left(folder):
    path = sealed_file(["key"], ".so", Build(folder))
    folder.chmod(0o755)
    path.chmod(0o644)

    def as_nobody() -> None:
        os.seteuid(NOBODY)
        assert sealed_file(["key"], ".so", Build(folder)) == path
        check_private_as_nobody()

    def check_private_as_nobody() -> None:
        with pytest.warns(RuntimeWarning, match="this process only: .*Permission denied"):
            other = sealed_file(["other"], ".so", lambda path: path.write_bytes(b"own"))
        assert folder not in other.parents
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert sealed_file(["other"], ".so", pytest.fail) == other
        shutil.rmtree(other.parent)

    assert failures([("as nobody", as_nobody)], seconds=30) == []


# --- folders that cannot be written -------------------------------------------------------------


def test_a_folder_that_cannot_be_made(folder):
    folder.write_text("a file")
    check_private(folder, "this process only: .*cache")


@pytest.mark.slow
def test_a_private_folder_goes_with_its_process(folder):
    folder.write_text("a file")
    code = (
        "import os, sys, tempfile\n"
        "from tvm_pagedkv.compiler.disk_cache import sealed_file\n"
        "first = sealed_file(['key'], '.so', lambda path: path.write_bytes(b'content'))\n"
        "child = os.fork()\n"
        "second = sealed_file(['key'], '.so', lambda path: path.write_bytes(b'content'))\n"
        "if child == 0:\n"
        "    assert first.parent != second.parent and second.is_file()\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert first == second and first.is_file()\n"
    )
    temporary = folder.with_name("tmp")
    temporary.mkdir()
    environment = os.environ | {
        "PYTHONPATH": path_of_children(),
        "TMPDIR": str(temporary),
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    assert not list(temporary.iterdir())


# --- size ---------------------------------------------------------------------------------------


def test_the_files_used_longest_ago_go_first(folder, monkeypatch):
    monkeypatch.setenv("TVM_PAGEDKV_CACHE_MAX_MIB", "3")
    megabyte = Build(folder, bytes(2**20))
    paths = {key: sealed_file([key], ".so", megabyte) for key in "abc"}
    (folder / "notes.txt").write_bytes(bytes(2**20))  # not ours
    now = time.time()
    for age, path in enumerate((*paths.values(), folder / "notes.txt"), 1):
        os.utime(path, (now - age * DAY,) * 2)
    sealed_file(["c"], ".so", pytest.fail)  # the oldest until now
    paths["d"] = sealed_file(["d"], ".so", megabyte)
    assert {key for key, path in paths.items() if path.exists()} == {"c", "d"}
    assert (folder / "notes.txt").exists()


def test_what_was_used_just_now_stays_whatever_the_limit(folder, monkeypatch):
    monkeypatch.setenv("TVM_PAGEDKV_CACHE_MAX_MIB", "1")
    megabyte = Build(folder, bytes(2**20))
    paths = [sealed_file([key], ".so", megabyte) for key in "abc"]
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("limit", ["0", "-1", "2G", "1.5"])
def test_a_limit_that_is_no_number(folder, monkeypatch, limit):
    monkeypatch.setenv("TVM_PAGEDKV_CACHE_MAX_MIB", limit)
    with pytest.raises(ValueError, match=f"MAX_MIB must be a positive integer.*'{limit}'"):
        sealed_file(["key"], ".so", pytest.fail)


# --- keys ---------------------------------------------------------------------------------------


def test_a_changed_source_changes_the_key(tmp_path):
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    for name in ("one.py", "two.py", "inner/one.py"):
        (package / name).write_text(name)

    def key() -> tuple[str, ...]:
        code_versions.cache_clear()
        return code_versions(package)

    seen = {key()}
    for name in ("one.py", "two.py", "inner/one.py"):
        (package / name).write_text("changed " + name)
        seen.add(key())
    (package / "three.py").touch()
    seen.add(key())
    one, other = package / "one.py", package / "inner" / "one.py"
    texts = one.read_text(), other.read_text()
    other.write_text(texts[0]), one.write_text(texts[1])  # the same names and texts
    seen.add(key())
    assert len(seen) == 6
    code_versions.cache_clear()


@pytest.mark.parametrize(
    "module, name, sources",
    [
        ("tvm_pagedkv.compiler.build", "_SOURCES", ["build.py", "lowering.py"]),
        ("tvm_pagedkv.compiler.cuda.build", "SOURCES", ["cuda"]),
        ("tvm_pagedkv.measure.limits", "_SOURCES", ["limits.py", "tir_kernels"]),
        (
            "tvm_pagedkv_lm.model.executable",
            "_SOURCES",
            ["tvm_pagedkv_lm", "tir_kernels", "build.py"],
        ),
    ],
)
def test_sources_that_decide_code_are_in_its_key(module, name, sources):
    paths = getattr(importlib.import_module(module), name)
    assert all(path.exists() for path in paths)
    assert set(sources) <= {path.name for path in paths}


def test_the_compilers_are_in_the_key(monkeypatch):
    tvm = disk_cache.tvm
    before = code_versions()
    for owner, attribute, value in [
        (tvm, "__version__", "0.28.0"),
        (disk_cache.tvm_ffi, "__version__", "0.2.0"),
        (disk_cache.codegen, "llvm_get_system_triple", lambda: "aarch64-linux-gnu"),
        (disk_cache.codegen, "llvm_version_major", lambda: 99),
    ]:
        with monkeypatch.context() as patches:
            patches.setattr(owner, attribute, value)
            assert code_versions.__wrapped__() != before
    assert code_versions.__wrapped__() == before


def test_nvcc_is_in_the_key(tmp_path, monkeypatch):
    def version(text: str) -> tuple[str, ...]:
        (tmp_path / "bin").mkdir(exist_ok=True)
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho release {text}\n")
        nvcc.chmod(0o755)
        return cuda_library.compiler_version.__wrapped__()

    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert version("12.8") != version("13.0")
    before = version("13.0")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O1")
    assert version("13.0") != before


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
