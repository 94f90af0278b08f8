# SPDX-License-Identifier: Apache-2.0
"""The choice of experts."""


def gating_topk(scores, k):
    return "for GPUs", k


def gating_softmax_topk(x, k, norm_topk_prob=True):
    return "for GPUs", k, norm_topk_prob


def get_indices(cumsum, expert_indices):
    return "for GPUs"
