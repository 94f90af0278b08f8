# SPDX-License-Identifier: Apache-2.0
"""The option ``--prompt-cache`` of ``generate`` and ``chat``: pages of texts in a folder."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm_pagedkv.config import PrefixCacheConfig

HOST_BYTES = 256 * 2**20
WAIT_SECONDS = 30.0


def add_prompt_cache(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--prompt-cache",
        metavar="DIR",
        help="keep the pages of texts in this folder, and find those of earlier runs there",
    )


def prefix_cache_of(options: argparse.Namespace) -> bool | PrefixCacheConfig:
    """Return whether to reuse prefixes, or the tiers that keep them.

    Parameters
    ----------
    options : argparse.Namespace
        With ``prompt_cache``, ``no_prefix_cache`` and ``model``.

    Raises
    ------
    OSError
        If the model's files cannot be read.
    """
    if options.prompt_cache is None:
        return not options.no_prefix_cache
    from tvm_pagedkv.config import PrefixCacheConfig
    from tvm_pagedkv.models import fingerprint

    return PrefixCacheConfig(
        disk_path=options.prompt_cache,
        host_bytes=HOST_BYTES,
        model_id=fingerprint(options.model),
        lookup_timeout=WAIT_SECONDS,
    )
