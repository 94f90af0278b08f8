# SPDX-License-Identifier: Apache-2.0
"""``python -m tvm_pagedkv``: the command ``tvm-pagedkv``."""

import sys

from tvm_pagedkv_cli import main

if __name__ == "__main__":
    sys.exit(main())
