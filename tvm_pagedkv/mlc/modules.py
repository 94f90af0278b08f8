# SPDX-License-Identifier: Apache-2.0
"""Import of the parts of mlc-llm that are replaced, with errors that name what is missing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

TRIED_WITH = "its sources of July 2026"


def find(module: str, *attributes: str) -> ModuleType:
    """Import a module of mlc-llm that must have the given attributes.

    Raises
    ------
    ImportError
        Where mlc-llm is not installed, or lacks the module or an attribute; the message names it.
    """
    if "mlc_llm" not in sys.modules and importlib.util.find_spec("mlc_llm") is None:
        raise ImportError(
            "tvm_pagedkv.mlc needs the Python package mlc_llm of mlc-llm, which is not installed"
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # mlc-llm is there, and something that it needs is not
        raise ImportError(_too_far(f"the module {error.name}")) from error
    for name in attributes:
        if not hasattr(found, name):
            raise ImportError(_too_far(f"{module}.{name}"))
    return found


def _too_far(what: str) -> str:
    package = sys.modules.get("mlc_llm")
    version = getattr(package, "__version__", None) or "of an unknown version"
    where = list(getattr(package, "__path__", ["an unknown place"]))[0]
    return (
        f"tvm_pagedkv.mlc expects {what}, which mlc-llm {version} in {where} does not have; "
        f"it was written for {TRIED_WITH}"
    )
