# SPDX-License-Identifier: Apache-2.0
"""Attention of many query rows at once: tiles of Q, K and V, scores and weights."""
