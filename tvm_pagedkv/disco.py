# SPDX-License-Identifier: Apache-2.0
"""The former name of `tvm_pagedkv.distributed.disco`."""

import sys

from .distributed import disco

sys.modules[__name__] = disco
