# SPDX-License-Identifier: Apache-2.0
"""Logits, the online softmax, partial states and the outputs of attention."""
