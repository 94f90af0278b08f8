# SPDX-License-Identifier: Apache-2.0
"""The cache of models written with ``tvm.relax.frontend.nn``, and the kernels they link."""
