# SPDX-License-Identifier: Apache-2.0
"""The command before it runs anything: help, version, and errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings

import pytest

from tvm_pagedkv import __version__
from tvm_pagedkv_lm.cli import command

LIGHT = [["--help"], ["generate", "--help"], ["--version"], ["no"]]


@pytest.mark.parametrize("arguments", LIGHT)
def test_nothing_heavy_is_imported_for_the_arguments(arguments):
    program = (
        "import sys, tvm_pagedkv_lm.cli\n"
        "try:\n"
        "    tvm_pagedkv_lm.cli.main(sys.argv[1:])\n"
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
        [sys.executable, "-m", "tvm_pagedkv_lm", "--version"], capture_output=True, text=True
    )
    assert result.stdout == f"tvm-pagedkv {__version__}\n" and result.returncode == 0


@pytest.mark.parametrize("arguments", LIGHT)
def test_python_m_parses_before_tvm_is_loaded(arguments):
    """Otherwise ``--help`` takes seconds, and ``--threads`` comes after TVM has chosen CPUs."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tvm_pagedkv_lm", *arguments],
        capture_output=True,
        text=True,
    )
    assert result.returncode == (2 if arguments == ["no"] else 0)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "argparse" in imported and not imported & {"tvm", "tvm_ffi", "numpy"}


def test_threads_are_set_before_tvm_is_loaded():
    """A single thread is not bound to a CPU: the process may still use all of them."""
    command = [sys.executable, "-m", "tvm_pagedkv_lm", "info", "--threads", "1"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TVM_")}
    found = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    assert f"1 of {len(os.sched_getaffinity(0))} CPUs that the process may use" in found


@pytest.mark.parametrize("count", ["0", "many", "-1", "100000", "²"])
def test_threads_beyond_the_cpus_are_refused(count, capsys):
    """Threads spin while they wait for each other: hundreds on a few CPUs take minutes to end."""
    with pytest.raises(SystemExit) as caught:
        command.main(["generate", "x", f"--threads={count}"])
    assert caught.value.code == 2
    num_cpus = len(os.sched_getaffinity(0))
    error = f"from 1 to {num_cpus}, the CPUs that the process may use, got '{count}'; see tvm-paged"
    assert error in capsys.readouterr().err


def test_mistakes_in_the_arguments_are_one_line(capsys):
    for arguments in ([], ["no"], ["generate", "--top-k", "x"], ["generate", "x", "--no-option"]):
        with pytest.raises(SystemExit) as caught:
            command.main(arguments)
        error = capsys.readouterr().err
        assert caught.value.code == 2
        assert error.startswith("tvm-pagedkv: error: ") and error.endswith(" --help\n")
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RuntimeError("nvcc failed:\na.cu(3): error: x\n1 error"),
         "tvm-pagedkv: error: nvcc failed:\na.cu(3): error: x\n1 error\n"),
        (KeyError("no sequence 3"), "tvm-pagedkv: error: no sequence 3\n"),
        (TypeError("a must be an int"), "tvm-pagedkv: error: a must be an int\n"),
        (ImportError("libx.so is missing"), "tvm-pagedkv: error: libx.so is missing\n"),
        (MemoryError(), "tvm-pagedkv: error: MemoryError\n"),
        (PermissionError(13, "Permission denied", "/a/b"),
         "tvm-pagedkv: error: /a/b: Permission denied\n"),
    ],
)  # fmt: skip
def test_errors_are_shown_whole(monkeypatch, capsys, error, shown):
    def fail(_):
        raise error

    monkeypatch.setattr(command.info, "run", fail)
    assert command.main(["info"]) == 2
    assert capsys.readouterr().err == shown


def test_warnings_are_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(
        command.info, "run", lambda _: warnings.warn("the disk is full", stacklevel=1)
    )
    with warnings.catch_warnings():  # restores how they are shown
        warnings.simplefilter("always")
        assert command.main(["info"]) == 0
    assert capsys.readouterr().err == "tvm-pagedkv: warning: the disk is full\n"


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
from tvm_pagedkv_lm.cli import main
sys.exit(main(["generate", "a text", "--model", "tiny", "--prefill-chunk-size", "2"]))
"""


@pytest.mark.parametrize(
    "when",
    ["tvm.runtime", "tokenizers", "tvm_pagedkv_lm.gguf", "loading weights", "reading prompt 1"],
)
def test_ctrl_c_ends_the_command_at_any_moment(when):
    """While modules are imported, weights are loaded, or a long prompt is computed."""
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, when], capture_output=True, text=True
    )
    assert result.returncode == 130, result.stderr
    assert "Traceback" not in result.stderr and "Interrupt" not in result.stderr


def test_ctrl_c_ends_python_m_while_tvm_is_loaded():
    command = [sys.executable, "-X", "importtime", "-m", "tvm_pagedkv_lm", "info"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "numpy" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130 and "Traceback" not in rest


def test_an_interrupt_leaves_no_traceback(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.info, "run", interrupt)
    assert command.main(["info"]) == 130
    assert capsys.readouterr().err == ""


LEAVE = """
import atexit, os, sys, threading, time, weakref
from tvm_pagedkv_lm.cli import command, info

class Object:
    def __init__(self, name):
        self.name = name
    def __del__(self, write=os.write):
        write(1, self.name + b" ends; ")

def run(_):
    global cycle, kept
    cycle, kept, single = Object(b"cycle"), Object(b"kept object"), Object(b"object")
    cycle.itself = cycle
    weakref.finalize(kept, os.write, 1, b"finalizer; ")
    atexit.register(os.write, 1, b"handler; ")
    threading.Thread(target=lambda: (time.sleep(0.1), os.write(1, b"thread; "))).start()
    print("text", end="; ")

info.run = run
sys.exit(command.main(["info"]) or 7)
"""


def test_the_command_ends_without_a_search_for_cycles():
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True)
    expected = "object ends; text; thread; handler; finalizer; "
    assert (done.returncode, done.stdout, done.stderr) == (7, expected, "")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
