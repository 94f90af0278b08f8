# SPDX-License-Identifier: Apache-2.0
"""The rotation of Q and K in the attention kernels of a spec."""

from __future__ import annotations

from ...signatures.inputs import AttentionInputs, PagedInputs
from ...spec import KernelSpec
from .hadamard_rotation import HadamardRotation
from .inline_rope import InlineRope, NoRotation


def rotation_of(spec: KernelSpec, a: AttentionInputs) -> InlineRope | HadamardRotation | NoRotation:
    """Choose by the spec and by where K lies."""
    if isinstance(a, PagedInputs) and spec.codec and spec.codec.has_hadamard:
        return HadamardRotation(spec, a)
    return NoRotation() if spec.is_latent else InlineRope(spec, a)
