# SPDX-License-Identifier: Apache-2.0
"""Components of the attention kernels for CPUs: TVMScript classes with one job each."""
