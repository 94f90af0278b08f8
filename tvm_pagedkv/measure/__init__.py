# SPDX-License-Identifier: Apache-2.0
"""Measurements of the machine: its read bandwidth and arithmetic peak, and memory to measure on."""

from .._huge_pages import HUGE_PAGE_BYTES, huge_zeros
from .limits import READ_BYTES, Limits

__all__ = ["HUGE_PAGE_BYTES", "READ_BYTES", "Limits", "huge_zeros"]
