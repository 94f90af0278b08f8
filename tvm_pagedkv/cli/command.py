# SPDX-License-Identifier: Apache-2.0
"""The command ``tvm-pagedkv``: its options, and how its errors appear."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from . import bundle, chat, generate, info, kernel

EXIT_MISTAKE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line without the program's name; None: ``sys.argv[1:]``.

    Returns
    -------
    int
        The exit status: 0, or 2 after an error, which is one line on stderr. With ``--traceback``
        the traceback precedes it.
    """
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if options.traceback:
            traceback.print_exc()
        print(f"tvm-pagedkv: error: {_first_line(error)}", file=sys.stderr)
        return EXIT_MISTAKE
    return 0


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tvm-pagedkv", description="Run and package models on this cache."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate.add_parser(commands)
    chat.add_parser(commands)
    bundle.add_parsers(commands)
    kernel.add_parser(commands)
    info.add_parser(commands)
    for command in commands.choices.values():
        command.add_argument(
            "--traceback", action="store_true", help="print the traceback of an error"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
