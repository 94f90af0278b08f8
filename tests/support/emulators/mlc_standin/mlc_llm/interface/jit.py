# SPDX-License-Identifier: Apache-2.0
"""Compiles a model in a process of its own, where there is no library of these settings yet."""

import os
import subprocess
import sys
from pathlib import Path

MLC_LLM_HOME = Path(os.environ["MLC_LLM_HOME"])


def jit(settings):
    library = MLC_LLM_HOME / "model_lib" / f"{settings}.so"
    if not library.is_file():
        command = [sys.executable, "-m", "mlc_llm", "compile", settings]
        done = subprocess.run(command, check=True, env=os.environ, capture_output=True, text=True)
        library.write_text(done.stdout)
    return library
