# SPDX-License-Identifier: Apache-2.0
"""Kernels of a decoder beside attention: linear layers, and kernels that work row by row."""
