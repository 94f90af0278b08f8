# SPDX-License-Identifier: Apache-2.0
"""The blocks of a decoder as ``nn`` modules: attention, MLPs, experts and recurrent layers."""
