# SPDX-License-Identifier: Apache-2.0
"""A stand-in for mlc-llm: the few calls that tvm_pagedkv.mlc replaces, made as mlc-llm makes them.

mlc-llm is in no package index. scripts/tools/try_mlc.py runs the real one.
"""

__version__ = "0.0.standin"
