# SPDX-License-Identifier: Apache-2.0
"""`install` and `uninstall`: switch mlc-llm to this package's cache, and back."""

from __future__ import annotations

from .dispatch import dispatch_to_our_cache
from .drift import bridge
from .experts import run_experts_on_cpus
from .gated_delta import run_recurrent_layers_on_cpus
from .model_config import keep_layer_windows, remember_compiled_model
from .patches import Patches
from .processes import WorkerPools, compile_with_our_cache
from .rnn_state import copy_rnn_states


class _Installation:
    """Everything that is replaced while mlc-llm uses our cache."""

    def __init__(self, flashinfer: bool):
        self._patches = Patches()
        try:
            bridge(self._patches)  # first: mlc-llm may not be importable without
            dispatch_to_our_cache(self._patches, flashinfer)
            remember_compiled_model(self._patches)
            keep_layer_windows(self._patches)
            copy_rnn_states(self._patches)
            run_recurrent_layers_on_cpus(self._patches)
            run_experts_on_cpus(self._patches)
            compile_with_our_cache(self._patches, flashinfer)
            self._pools = WorkerPools()
        except BaseException:
            self._patches.undo()
            raise

    def undo(self) -> None:
        self._pools.undo()
        self._patches.undo()


_installed: list[_Installation] = []  # at most one


def install(*, flashinfer: bool = False) -> None:
    """Make mlc-llm compile models with our cache, in this process and in those it starts.

    A second call replaces the first one.

    Parameters
    ----------
    flashinfer : bool
        Let mlc-llm also add a cache over FlashInfer's kernels where it would (CUDA, 16 bits); its
        engine uses that one then, driven by our runtime object.

    Raises
    ------
    ImportError
        Where mlc-llm is not installed, or has changed too much; says what was expected. Nothing is
        replaced then.
    """
    uninstall()
    _installed.append(_Installation(flashinfer))


def uninstall() -> None:
    """Put everything back that `install` replaced; without an installation, do nothing.

    Models that were compiled meanwhile keep their cache.
    """
    while _installed:
        _installed.pop().undo()
