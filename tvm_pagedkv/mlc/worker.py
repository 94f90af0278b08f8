# SPDX-License-Identifier: Apache-2.0
"""Entry point of a worker process of mlc-llm: as mlc-llm's own, with this package loaded."""

from __future__ import annotations

from ..distributed import load_disco
from .drift import add_missing_tvm_names
from .patches import Patches


def main() -> None:
    """Serve the controller, which gives this process its arguments, until it is done."""
    load_disco()
    add_missing_tvm_names(Patches())  # for as long as the process lives
    from mlc_llm.cli import worker

    worker.main()


if __name__ == "__main__":
    try:
        main()
    except (OSError, KeyboardInterrupt):
        pass  # the controller has gone
