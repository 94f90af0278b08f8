# SPDX-License-Identifier: Apache-2.0
"""A model that several workers of one machine run together."""
