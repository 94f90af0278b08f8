# SPDX-License-Identifier: Apache-2.0
"""What kernels are called with.

`inputs` declares the arguments of attention, and `attention` says which kernel takes which of them.
`sparse`, `moves` and `states` do both for other kernels. `signature` matches them.
"""
