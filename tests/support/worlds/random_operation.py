# SPDX-License-Identifier: Apache-2.0
"""Operations on random worlds, one kind of change each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import tvm_ffi

if TYPE_CHECKING:
    from .random_world import World


@tvm_ffi.register_error("KernelFails")
class KernelFails(RuntimeError):
    """The error that a broken kernel raises."""


class Operation(ABC):
    """One kind of change; `weight` is how often it is drawn."""

    weight = 1.0
    needs_pages = False  # whether a CacheFullError may come
    gives_pages_back = False  # whether it takes pages in a first call, before another one may fail

    def outcomes(self, world: World) -> set[str]:
        """Return the outcomes that every run must see: done, refused, full, a kernel fails."""
        return {"done", "refused"}

    @abstractmethod
    def draw(self, world: World) -> Any:
        """Arguments; None when there is nothing to do it with."""

    def refusal(self, world: World, args: Any) -> type[Exception] | None:
        """Return the error that the cache must raise."""
        return None

    def may_be_gone(self, world: World, args: Any) -> bool:
        """Whether the cache may say instead that it has reclaimed pages that are needed."""
        return False

    @abstractmethod
    def apply(self, world: World, args: Any) -> Any:
        """Call the cache; where a kernel is made to fail, it may raise KernelFails."""

    def check(self, world: World, args: Any, result: Any) -> None:  # noqa: B027  (not all have to)
        """Do the same to the reference, and compare."""
