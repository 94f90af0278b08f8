# SPDX-License-Identifier: Apache-2.0
"""From products to weights: what rows see, logits, softmax."""
