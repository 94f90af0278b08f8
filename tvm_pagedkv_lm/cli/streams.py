# SPDX-License-Identifier: Apache-2.0
"""Standard streams of the command that are closed, full, left by their reader, or not UTF-8.

A stream that is closed is as good as /dev/null. Standard output is the command's result, so it is
an error if it cannot be written; notes on stderr are not, and are dropped.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import sys
from typing import Any

_REPLACE = "tvm_pagedkv.replace"


class OutputError(Exception):
    """Standard output takes no more text.

    Parameters
    ----------
    cause : OSError

    Attributes
    ----------
    has_reader : bool
        False where output is a pipe whose reader has left, as ``head`` does.
    """

    def __init__(self, cause: OSError):
        super().__init__(f"standard output: {cause.strerror}")
        self.has_reader = cause.errno != errno.EPIPE


class _Descriptor(io.FileIO):
    """Descriptor 1 or 2 as bytes."""

    def write(self, data: Any) -> int:
        while True:
            try:
                count = super().write(data)
            except OSError as error:
                if self.fileno() == 1:
                    raise OutputError(error) from None
                return len(data)
            if count is not None:
                return count
            select.select([], [self], [])  # another process has made the pipe non-blocking


def prepare() -> None:
    """Replace the standard streams of Python, unless the program has done so before."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the next file that is opened would get the number of the stream
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    codecs.register_error(_REPLACE, _replace)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")
    elif sys.stdin is sys.__stdin__ and isinstance(sys.stdin, io.TextIOWrapper):
        # A line with other bytes can then be refused by itself.
        sys.stdin.reconfigure(errors="surrogateescape")
    if sys.stdout is sys.__stdout__:
        sys.stdout = _writer(1, sys.stdout, _REPLACE)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _writer(2, sys.stderr, "backslashreplace")


def _writer(number: int, stream: Any, errors: str) -> io.TextIOWrapper:
    """Return a stream like Python's, which is None where it was closed, for a descriptor."""
    if stream is not None and stream.errors not in ("strict", "surrogateescape"):
        errors = stream.errors  # the user's choice, or that of stderr
    raw = _Descriptor(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if stream is None else stream.encoding,
        errors=errors,
        line_buffering=number == 2 or raw.isatty(),
    )


_has_warned = False


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write ``?`` in place of what the encoding has not, and warn once. Bytes of names stay."""
    global _has_warned
    assert isinstance(error, UnicodeEncodeError)
    if all("\udc80" <= each <= "\udcff" for each in error.object[error.start : error.end]):
        return codecs.lookup_error("surrogateescape")(error)
    if not _has_warned:
        _has_warned = True
        print(
            f"tvm-pagedkv: warning: standard output is {error.encoding}, so some characters cannot "
            "be written and appear as ?; PYTHONIOENCODING=utf-8 writes all",
            file=sys.stderr,
        )
    return codecs.replace_errors(error)


def flushed(status: Any) -> Any:
    """Write what is buffered; return this exit status, or that of an output that fails."""
    try:
        sys.stdout.flush()
    except OutputError as error:
        return failed(error)
    return status


def failed(error: OutputError) -> int:
    """Drop all further output, and say why; return the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if not error.has_reader:
        return 0
    print(f"tvm-pagedkv: error: {error}", file=sys.stderr)
    return 2
