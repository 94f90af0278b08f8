# SPDX-License-Identifier: Apache-2.0
"""Workloads that share beginnings, their replay and an exact simulation."""
