# SPDX-License-Identifier: Apache-2.0
"""The former name of `tvm_pagedkv.generation.disaggregated`."""

import sys

from .generation import disaggregated

sys.modules[__name__] = disaggregated
