# SPDX-License-Identifier: Apache-2.0
"""Instructions of CPUs as fragments of TIR: vectors, their operands and products of them.

Language models' kernels may use this folder, and no other of the kernels' parts."""
