# SPDX-License-Identifier: Apache-2.0
"""The attention kernels' arguments: one `prim_func` per kernel, for all targets.

Each takes a spec and `attend`, the target's skeleton, which emits the body for typed inputs. What
the arguments are is told in `inputs`.
"""
