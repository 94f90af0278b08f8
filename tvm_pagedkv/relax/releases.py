# SPDX-License-Identifier: Apache-2.0
"""Names of Relax that differ between the releases of apache-tvm that the project runs with."""

from __future__ import annotations

import tvm
from tvm import relax

# Relax shares the constants of kernels since 0.27.
StringImm = tvm.ir.StringImm if hasattr(tvm.ir, "StringImm") else relax.StringImm
