# SPDX-License-Identifier: Apache-2.0
"""Tests of the stores of pages."""
