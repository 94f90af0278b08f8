# SPDX-License-Identifier: Apache-2.0
"""Entry point of a Disco worker process: as that of apache-tvm, with this package loaded."""

from __future__ import annotations

from .disco import load_disco


def main() -> None:
    """Serve the controller, which gives this process its arguments, until it is done."""
    load_disco()
    from tvm.exec import disco_worker

    disco_worker.main()


if __name__ == "__main__":
    try:
        main()
    except (OSError, KeyboardInterrupt):
        pass  # the controller has gone
