# SPDX-License-Identifier: Apache-2.0
"""Operators of mixtures of experts: functions that bind GPU threads."""
