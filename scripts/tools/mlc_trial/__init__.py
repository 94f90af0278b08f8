# SPDX-License-Identifier: Apache-2.0
"""Parts of try_mlc.py: mlc-llm's model families, small and random, over either cache."""
