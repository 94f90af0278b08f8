# SPDX-License-Identifier: Apache-2.0
"""``python -m tvm_pagedkv.mlc [--flashinfer] COMMAND ...``: mlc-llm's commands with our cache."""

from __future__ import annotations

import sys

from . import install
from .modules import find


def main(arguments: list[str]) -> None:
    """Run a command of mlc-llm, such as ``compile`` or ``serve``."""
    flashinfer = arguments[:1] == ["--flashinfer"]
    install(flashinfer=flashinfer)
    command = find("mlc_llm.__main__", "main")
    sys.argv = ["mlc_llm", *arguments[flashinfer:]]
    command.main()


if __name__ == "__main__":
    main(sys.argv[1:])
