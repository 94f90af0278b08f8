# SPDX-License-Identifier: Apache-2.0
"""The part of `KVCache` that models with recurrent layers call within a step."""

from __future__ import annotations

import functools
from typing import Any

import tvm

from .._functions import as_int, global_function
from .index_lane import CacheIndexLanes


class CacheRecurrence(CacheIndexLanes):
    """The methods of `KVCache` for recurrent layers and short convolutions."""

    __slots__ = ()

    def recurrent(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        log_decay: Any,
        beta: Any = None,
        scale: float | None = None,
        out: Any = None,
    ) -> tvm.runtime.Tensor:
        """Take the states of a recurrent layer through the rows of this step.

        A token makes the state S of a head ``exp(g) * S + k (x) u`` and reads
        ``o = scale * S^T q``, where u is v, or with a delta rule
        ``beta * (v - (exp(g) * S)^T k)``; see `docs/recurrent-layers.md`. Rows of a token tree
        continue the state of their parent.

        Parameters
        ----------
        layer : int
            Id of a layer of kind "recurrent". Call this once for it in a step.
        q, k : tensors ``[T, num_key_heads, key_dim]``, the cache's dtype
        v : tensor ``[T, num_heads, value_dim]``, the cache's dtype
        log_decay : float32 ``[T, num_heads]``
            g. With the rule "kda" ``[T, num_heads, key_dim]``.
        beta : float32 ``[T, num_heads]``, optional
            For the rules with a delta, "gated_delta" and "kda".
        scale : float, optional
            Factor on q; None: ``key_dim ** -0.5``.
        out : contiguous tensor ``[T, num_heads, value_dim]``, optional
            Receives the result.

        Returns
        -------
        o : tvm tensor ``[T, num_heads, value_dim]``, the cache's dtype
            `out`, if it was given.

        Raises
        ------
        ValueError, TypeError, IndexError
            If no step has begun, the layer is none of this kind or was called in this step
            already, or a tensor does not fit.
        """
        names = ("q", "k", "v", "log_decay")
        tensors = [
            self._tensor(name, x) for name, x in zip(names, (q, k, v, log_decay), strict=True)
        ]
        if beta is not None:
            tensors.append(self._tensor("beta", beta))
        about = self._part(self._recurrent_layers, layer, "pagedkv.check_recurrent")
        if scale is None:
            scale = about["key_dim"] ** -0.5
        if out is None:
            shape = (tensors[0].shape[0], about["num_heads"], about["value_dim"])
            out = tvm.runtime.empty(shape, self.description["dtype"], self.description["device"])
        call = global_function("pagedkv.recurrent")
        call(self, as_int("layer", layer), float(scale), *tensors, out)
        return out

    def conv(
        self, layer: int, x: Any, weight: Any, bias: Any = None, out: Any = None
    ) -> tvm.runtime.Tensor:
        """Convolve the rows of this step with those before them, each channel by itself.

        Row t of the result is ``activation(bias + sum(weight[:, i] * x[t - width + 1 + i]))``;
        rows before the first one are zeros. The rows before that of a tree node are its ancestors'.

        Parameters
        ----------
        layer : int
            Id of a layer with a `ConvConfig`.
        x : tensor ``[T, channels]``, the cache's dtype
        weight : tensor ``[channels, width]``, the cache's dtype
        bias : tensor ``[channels]``, the cache's dtype
            If the convolution has one.
        out : contiguous tensor ``[T, channels]``, optional
            Receives the result.

        Returns
        -------
        o : tvm tensor ``[T, channels]``, the cache's dtype
            `out`, if it was given.

        Raises
        ------
        ValueError, TypeError, IndexError
            If no step has begun, the layer has no convolution, or a tensor does not fit.
        """
        tensors = [self._tensor("x", x), self._tensor("weight", weight)]
        if bias is not None:
            tensors.append(self._tensor("bias", bias))
        about = self._part(self._conv_layers, layer, "pagedkv.check_conv")
        if out is None:
            shape = (tensors[0].shape[0], about["channels"])
            out = tvm.runtime.empty(shape, self.description["dtype"], self.description["device"])
        global_function("pagedkv.conv")(self, as_int("layer", layer), *tensors, out)
        return out

    def _part(self, layers: dict[int, dict[str, Any]], layer: int, check: str) -> dict[str, Any]:
        if layer not in layers:
            global_function(check)(self, as_int("layer", layer))  # raises
        return layers[layer]

    @functools.cached_property
    def _recurrent_layers(self) -> dict[int, dict[str, Any]]:
        return {layer["id"]: layer for layer in self.description["recurrent_layers"]}

    @functools.cached_property
    def _conv_layers(self) -> dict[int, dict[str, Any]]:
        return {layer["id"]: layer for layer in self.description["conv_layers"]}
