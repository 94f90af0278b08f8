# SPDX-License-Identifier: Apache-2.0
"""The option ``--prompt-cache`` of ``generate`` and ``chat``: pages of texts in a folder."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

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


def prefix_cache_of(options: argparse.Namespace, model: Any) -> bool | PrefixCacheConfig:
    """Return whether to reuse prefixes, or the tiers that keep them.

    Parameters
    ----------
    options : argparse.Namespace
        With ``prompt_cache`` and ``no_prefix_cache``.
    model : DecoderModel
    """
    if options.prompt_cache is None:
        return not options.no_prefix_cache
    from tvm_pagedkv.config import PrefixCacheConfig

    return PrefixCacheConfig(
        disk_path=options.prompt_cache,
        host_bytes=HOST_BYTES,
        model_id=model.fingerprint,
        lookup_timeout=WAIT_SECONDS,
    )
