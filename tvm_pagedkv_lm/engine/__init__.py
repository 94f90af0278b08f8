# SPDX-License-Identifier: Apache-2.0
"""Batched text generation: sampling, conversations, drafts, disaggregated prefill."""
