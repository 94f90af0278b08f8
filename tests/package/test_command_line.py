# SPDX-License-Identifier: Apache-2.0
"""The command before it runs anything: help, version, and errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tvm_pagedkv import __version__
from tvm_pagedkv_cli import command


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"], ["no"]])
def test_nothing_heavy_is_imported_for_the_arguments(arguments):
    program = (
        "import sys, tvm_pagedkv_cli\n"
        "try:\n"
        "    tvm_pagedkv_cli.main(sys.argv[1:])\n"
        "finally:\n"
        "    heavy = {'tvm', 'tvm_ffi', 'tvm_pagedkv', 'numpy', 'rich', 'tokenizers'}\n"
        "    print('heavy:', *sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True
    )
    assert result.returncode == (2 if arguments == ["no"] else 0)
    assert result.stdout.splitlines()[-1].strip() == "heavy:", result.stdout
    if arguments == ["--version"]:
        assert result.stdout.startswith(f"tvm-pagedkv {__version__}\n")


def test_python_m_is_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "tvm_pagedkv", "--version"], capture_output=True, text=True
    )
    assert result.stdout == f"tvm-pagedkv {__version__}\n" and result.returncode == 0


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RuntimeError("nvcc failed:\na.cu(3): error: x\n1 error"),
         "tvm-pagedkv: error: nvcc failed:\na.cu(3): error: x\n1 error\n"),
        (KeyError("no sequence 3"), "tvm-pagedkv: error: no sequence 3\n"),
        (TypeError("a must be an int"), "tvm-pagedkv: error: a must be an int\n"),
        (ImportError("libx.so is missing"), "tvm-pagedkv: error: libx.so is missing\n"),
        (MemoryError(), "tvm-pagedkv: error: MemoryError\n"),
    ],
)  # fmt: skip
def test_errors_are_shown_whole(monkeypatch, capsys, error, shown):
    def fail(_):
        raise error

    monkeypatch.setattr(command.info, "run", fail)
    assert command.main(["info"]) == 2
    assert capsys.readouterr().err == shown


def test_the_cause_of_an_error_is_shown(monkeypatch, capsys):
    def fail(_):
        try:
            raise OSError("the disk is full")
        except OSError as error:
            raise RuntimeError("cannot compile") from error

    monkeypatch.setattr(command.info, "run", fail)
    assert command.main(["info"]) == 2
    assert capsys.readouterr().err == (
        "tvm-pagedkv: error: cannot compile\ncaused by: the disk is full\n"
    )


INTERRUPTED = """
import logging, os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt_at(name):
    if name.startswith(sys.argv[1]):
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, Finder)]
        log.handlers.clear()
        os.kill(os.getpid(), signal.SIGINT)

class Finder:
    def find_spec(self, name, *_):
        interrupt_at(name)

class Handler(logging.Handler):
    def emit(self, record):
        interrupt_at(record.getMessage())

log = logging.getLogger("tvm_pagedkv.progress")
log.addHandler(Handler())
sys.meta_path.insert(0, Finder())
from tvm_pagedkv_cli import main
sys.exit(main(["generate", "a text", "--model", "tiny", "--prefill-chunk-size", "2"]))
"""


@pytest.mark.parametrize(
    "when",
    ["tvm.runtime", "tokenizers", "tvm_pagedkv.models.gguf", "loading weights", "reading prompt 1"],
)
def test_ctrl_c_ends_the_command_at_any_moment(when):
    """While modules are imported, weights are loaded, or a long prompt is computed."""
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, when], capture_output=True, text=True
    )
    assert result.returncode == 130, result.stderr
    assert "Traceback" not in result.stderr and "Interrupt" not in result.stderr


def test_an_interrupt_leaves_no_traceback(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.info, "run", interrupt)
    assert command.main(["info"]) == 130
    assert capsys.readouterr().err == ""


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
