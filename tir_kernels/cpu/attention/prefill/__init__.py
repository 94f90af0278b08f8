# SPDX-License-Identifier: Apache-2.0
"""Prefill: tiles of query rows, bound by multiply-adds."""
