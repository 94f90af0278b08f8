# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's GPUs of compute capability 8.0 and up: instructions, launches, tensor cores."""
