# SPDX-License-Identifier: Apache-2.0
"""Parts of try_mlc_engine.py: mlc-llm's C++ engine, built and run over this package's cache."""
