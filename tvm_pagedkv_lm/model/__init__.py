# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as models that run: sources, compiled code, caches."""
