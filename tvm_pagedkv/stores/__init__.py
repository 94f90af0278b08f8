# SPDX-License-Identifier: Apache-2.0
"""Stores of pages outside the process, and the worker that serves a cache's tier from one."""

from .interface import PageStore

__all__ = ["PageStore"]
