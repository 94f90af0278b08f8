# SPDX-License-Identifier: Apache-2.0
"""Families of models: the fields of a config.json become a `DecoderConfig`; one file a family."""
