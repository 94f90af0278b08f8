# SPDX-License-Identifier: Apache-2.0
"""``python -m tvm_pagedkv_lm``: the command ``tvm-pagedkv``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
