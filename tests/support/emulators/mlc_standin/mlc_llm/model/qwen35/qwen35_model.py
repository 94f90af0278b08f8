# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5: a kernel that binds GPU threads."""


def create_gated_delta_net_func(**arguments):
    return "a kernel for GPUs", arguments
