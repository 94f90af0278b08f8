# SPDX-License-Identifier: Apache-2.0
"""The command with standard streams that are closed, full, left by their reader, or not UTF-8."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

# A command without TVM, which starts in no time: it notes, reads its input and prints.
PROGRAM = """
import os, sys
from tvm_pagedkv_lm.cli import command, info

def run(_):
    print("a note", file=sys.stderr)
    text = os.environ.get("TEXT", "").encode().decode("unicode_escape")
    print(sys.stdin.read(), text, "x" * 9000, "the end")

info.run = run
sys.exit(command.main())
"""
STUB = "stub"
COMMAND = shlex.join([sys.executable, "-m", "tvm_pagedkv_lm"])
ONE = "generate --model tiny --temperature 0 --max-tokens 6 'The with statement'"
TWO = f"{ONE} 'A list is'"
CHAT = "chat --model tiny --temperature 0 --max-tokens 6"
MESSAGE = b"The with statement\n"
FULL = "/dev/full"


def commands(*others: str) -> list:
    """The command without TVM, and others for the long runs."""
    return [STUB, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]


def run(arguments: str, redirections: str = "", stdin: bytes = b"", **environment: str):
    """Run the command in a shell, which closes and redirects its streams."""
    command = f"{COMMAND} {arguments}"
    if arguments == STUB:
        command = shlex.join([sys.executable, "-c", PROGRAM, "info"])
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {redirections}"],
        input=stdin,
        capture_output=True,
        env=os.environ | environment,
        timeout=120,
    )


def text_of(arguments: str, stdin: bytes = b"") -> bytes:
    done = run(arguments, stdin=stdin)
    assert done.returncode == 0 and done.stdout, done.stderr
    return done.stdout


@functools.cache
def expected(command: str, stdin: bytes = MESSAGE) -> bytes:
    """What a command prints with streams as usual."""
    return text_of(command, stdin)


@pytest.mark.parametrize("redirection", ["<&-", "2>&-", "<&- 2>&-", f"2>{FULL}"])
@pytest.mark.parametrize("command", commands(ONE, CHAT))
def test_text_arrives_where_there_is_a_place(command, redirection):
    done = run(command, redirection, MESSAGE)
    assert done.returncode == 0
    if command == CHAT and "<&-" in redirection:
        assert done.stdout == b""  # the conversation ends at once
    else:
        assert done.stdout == expected(command, b"" if "<&-" in redirection else MESSAGE)
    assert b"Error" not in done.stderr


@pytest.mark.parametrize("command", commands(TWO, CHAT, "info", "kernel"))
@pytest.mark.parametrize("redirection", [">&-", "<&- >&- 2>&-"])
def test_output_that_nobody_wants_is_no_error(command, redirection):
    done = run(command, redirection, MESSAGE)
    assert done.returncode == 0 and b"Error" not in done.stderr, done.stderr


@pytest.mark.slow
def test_mistakes_are_told_by_the_status():
    for redirection in ("2>&-", f"2>{FULL}", "<&- >&- 2>&-"):
        assert run("generate --no-such-option", redirection).returncode == 2
        assert run("generate --file no/such/file", redirection).returncode == 2


@pytest.mark.parametrize("command", [*commands(ONE, TWO, CHAT, "info", "kernel decode"), "--help"])
def test_a_full_disk_is_an_error(command):
    done = run(command, f">{FULL}", MESSAGE)
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert lines[-1] == b"tvm-pagedkv: error: standard output: No space left on device"
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr


@pytest.mark.parametrize("command", [*commands(TWO, CHAT, "info", "kernel decode"), "--help"])
def test_a_reader_that_leaves_ends_the_command(command):
    done = run(command, "| true", MESSAGE * 3)
    assert done.returncode == 0
    assert b"roken" not in done.stderr and b"Exception" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_cannot_be_written_are_replaced(encoding):
    done = run(STUB, PYTHONIOENCODING=encoding, TEXT=r"caf\u00e9 \u03c0, \u20ac and \u03c0")
    assert done.returncode == 0
    shown = "caf? ?" if encoding == "ascii" else "caf\u00e9 ?"
    assert shown in done.stdout.decode(encoding)
    assert done.stderr.count(b"cannot be written") == 1
    assert f"standard output is {encoding}".encode() in done.stderr.replace(
        b"iso8859-1", b"latin-1"
    )


def test_bytes_that_are_no_text_pass_through():
    """Such as names of files: in the C locale, and where it is UTF-8."""
    old = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for environment in (old, {}):
        done = run(STUB, stdin=b"caf\xe9", **environment)
        assert done.returncode == 0 and done.stdout.startswith(b"caf\xe9")
        assert done.stderr == b"a note\n"


def test_a_handler_of_the_users_is_kept():
    done = run(STUB, PYTHONIOENCODING="ascii:backslashreplace", TEXT=r"\u03c0")
    assert done.returncode == 0 and rb"\u03c0" in done.stdout
    assert b"cannot be written" not in done.stderr


def test_a_line_that_is_not_text_is_refused_and_the_next_one_answered():
    done = run(CHAT, stdin=b"caf\xe9\n" + MESSAGE)
    assert done.returncode == 0 and done.stdout.count(b"\n") == 1
    assert b"the message is not UTF-8 text" in done.stderr


@pytest.mark.slow
def test_input_in_the_encoding_of_the_user():
    done = run(CHAT, stdin=b"caf\xe9\n", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0 and done.stdout and b"UTF-8" not in done.stderr


def test_files_do_not_take_the_place_of_a_closed_stream(tmp_path):
    """Else what TVM logs on descriptor 2 would be written into a file of pages."""
    program = (
        "import os, sys; from tvm_pagedkv_lm.cli.streams import prepare; prepare();"
        f"number = os.open({str(tmp_path / 'x')!r}, os.O_CREAT | os.O_RDWR); sys.exit(number)"
    )
    command = shlex.join([sys.executable, "-c", program])
    done = subprocess.run(["bash", "-c", f"{command} <&- >&- 2>&-"], timeout=60)
    assert done.returncode >= 3


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
