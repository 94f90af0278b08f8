# SPDX-License-Identifier: Apache-2.0
"""What apache-tvm 0.26 has not, so that tests of it are skipped there.

It cannot compile kernels for CUDA as they are written, and its own cache, which tests compare with,
lacks functions that came with 0.27.
"""

from __future__ import annotations

from importlib.metadata import version

import pytest

IS_OLDER = version("apache-tvm").startswith("0.26.")  # read without an import of tvm
PREFIX = "apache-tvm 0.26: "
_MISSING = ("kernels for CUDA need apache-tvm 0.27", "needs a KV cache as its first argument")


def skip_if_absent(error: BaseException) -> None:
    """Skip the test if an error says that the installed release is too old."""
    if IS_OLDER and any(text in str(error) for text in _MISSING):
        pytest.skip(PREFIX + str(error).splitlines()[0])
