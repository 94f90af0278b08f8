# SPDX-License-Identifier: Apache-2.0
"""Tokens and chat templates."""
