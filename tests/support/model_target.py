# SPDX-License-Identifier: Apache-2.0
"""The target of the models in tests of front ends."""

from tvm.target import Target

# Any x86-64, and without LLVM's optimisations: they take half of the time that such a test takes,
# and kernels have tests of their own, for this target too.
MODEL_TARGET = Target({"kind": "llvm", "opt-level": 0})
