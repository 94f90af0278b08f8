# SPDX-License-Identifier: Apache-2.0
"""Print where the C++ parts of the package are: ``python -m tvm_pagedkv.config --cmakedir``."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import _library

_PACKAGE = Path(__file__).parents[1]


def main(arguments: list[str] | None = None) -> None:
    """Print one path on standard output."""
    parser = argparse.ArgumentParser(prog="python -m tvm_pagedkv.config", description=__doc__)
    choices = parser.add_mutually_exclusive_group(required=True)
    choices.add_argument(
        "--cmakedir", action="store_true", help="folder of tvm_pagedkv-config.cmake"
    )
    choices.add_argument("--includedir", action="store_true", help="folder of the C++ header")
    choices.add_argument("--library", action="store_true", help="path of libtvm_pagedkv.so")
    options = parser.parse_args(arguments)
    if options.cmakedir:
        print(_PACKAGE / "share" / "cmake" / "tvm_pagedkv")
    elif options.includedir:
        print(_PACKAGE / "include")
    else:
        print(_library.path())


if __name__ == "__main__":
    main()
