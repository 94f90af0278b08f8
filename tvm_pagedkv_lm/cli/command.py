# SPDX-License-Identifier: Apache-2.0
"""The command ``tvm-pagedkv``: its options, and how its errors appear."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from . import bundle, chat, generate, info, kernel, model
from .streams import OutputError, failed, flushed, prepare

EXIT_MISTAKE = 2
# What a mistake of the user can raise, in the options or in the files that they name.
_MISTAKES = (
    ValueError, OSError, RuntimeError, MemoryError, ImportError, TypeError, LookupError,
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are a sentence, without all options before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_MISTAKE, f"tvm-pagedkv: error: {message}; see {self.prog} --help\n")


def _threads(text: str) -> int:
    num_cpus = len(os.sched_getaffinity(0))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= num_cpus:
        raise argparse.ArgumentTypeError(
            f"expected an integer from 1 to {num_cpus}, the CPUs that the process may use, got "
            f"{text!r}"
        )
    return int(text)


class _Version(argparse.Action):
    """``--version``; a package's version takes time to find, so it is looked up when asked for."""

    def __call__(self, parser, *_) -> None:
        from importlib.metadata import version

        print("tvm-pagedkv", version("tvm-pagedkv"))
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line without the program's name; None: ``sys.argv[1:]``.

    Returns
    -------
    int
        The exit status: 0; 2 after an error, whose message is on stderr, with its cause and with
        ``--traceback`` after the traceback; 130 after Ctrl-C.
    """
    options = None
    # Before it ends, Python searches all objects for cycles, which takes 0.4 s once TVM is loaded.
    # The system frees their memory anyway, and whatever must be closed is registered with `atexit`.
    atexit.register(gc.freeze)
    prepare()
    warnings.showwarning = _show_warning
    try:
        options = _parse(arguments)
        options.run(options)
    except KeyboardInterrupt:
        return flushed(130)
    except OutputError as error:
        return failed(error)
    except SystemExit as end:  # of --help, or of a mistake in the options
        raise SystemExit(flushed(end.code)) from None
    except _MISTAKES as error:
        if options is not None and options.traceback:
            traceback.print_exc()
        print(f"tvm-pagedkv: error: {_text(error)}", file=sys.stderr)
        return flushed(EXIT_MISTAKE)
    return flushed(0)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"tvm-pagedkv: warning: {message}", file=sys.stderr)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = _parser().parse_args(arguments)
    if options.threads is not None:  # read when TVM is loaded, here and in workers
        os.environ["TVM_NUM_THREADS"] = str(options.threads)
    return options


def _text(error: BaseException) -> str:
    """Return the message of an error, then the messages of its causes."""
    if isinstance(error, KeyError) and error.args:  # whose str() adds quotes
        text = str(error.args[0])
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = str(error)
    text = text.strip() or type(error).__name__
    cause = error.__cause__
    return text if cause is None else f"{text}\ncaused by: {_text(cause)}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tvm-pagedkv", description="Run and package language models on a paged KV cache."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate.add_parser(commands)
    chat.add_parser(commands)
    model.add_parser(commands)
    bundle.add_parsers(commands)
    kernel.add_parser(commands)
    info.add_parser(commands)
    for command in commands.choices.values():
        command.add_argument(
            "--traceback", action="store_true", help="print the traceback of an error"
        )
        command.add_argument(
            "--threads",
            type=_threads,
            metavar="N",
            help="CPU threads (default: the CPUs that the process may use)",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
