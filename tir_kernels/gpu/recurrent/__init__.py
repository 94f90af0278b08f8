# SPDX-License-Identifier: Apache-2.0
"""Kernels of recurrent layers on GPUs."""
