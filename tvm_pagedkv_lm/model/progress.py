# SPDX-License-Identifier: Apache-2.0
"""Progress of work in many steps: INFO records of the logger ``tvm_pagedkv.progress``."""

from __future__ import annotations

import logging

PROGRESS = "tvm_pagedkv.progress"  # a handler may show these records on a terminal only
_log = logging.getLogger(PROGRESS)


def report(what: str, num_done: int, num_steps: int) -> None:
    """Report how much of some work is done."""
    _log.info("%s: %d %%", what, 100 * num_done // num_steps)
