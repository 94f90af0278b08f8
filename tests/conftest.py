# SPDX-License-Identifier: Apache-2.0
"""Tests keep compiled files beside pytest's own cache, never in the user's."""

import os
from pathlib import Path

_COMPILED = Path(__file__).resolve().parent.parent / ".pytest_cache" / "compiled"
os.environ.setdefault("TVM_PAGEDKV_CACHE", str(_COMPILED))
