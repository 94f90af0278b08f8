# SPDX-License-Identifier: Apache-2.0
"""Components of the kernels for GPUs: `T.meta_class` classes with one job each."""
