# SPDX-License-Identifier: Apache-2.0
"""What kernels are called with.

`inputs` declares the arguments, `attention`, `moves` and `sparse` say which kernel takes which of
them, and `signature` matches them.
"""
