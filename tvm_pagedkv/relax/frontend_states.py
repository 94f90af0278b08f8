# SPDX-License-Identifier: Apache-2.0
"""`StateMethods`: the recurrences and convolutions of a cache that a model's function takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax
from tvm.relax.frontend.nn import Object, Tensor


class StateMethods(Object):
    """Methods of a cache for layers that keep a state in place of K and V."""

    def recurrent(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor | None = None,
        *,
        scale: float = 1.0,
    ) -> Tensor:
        """Take the states of a recurrent layer through the rows of this step.

        The state S ``[key_dim, value_dim]`` of a head becomes ``exp(g) * S + k (x) u``, and its row
        of the output is ``scale * S^T q``. Delta rules have ``u = beta * (v - (exp(g) * S)^T k)``,
        the others v. Where the layer has a convolution, call `conv` for it before.

        Parameters
        ----------
        layer_id : int
        q, k : ``[T, num_key_heads, key_dim]``
            T is the number of rows of the step, for all its sequences.
        v : ``[T, num_heads, value_dim]``
        log_decay : float32 ``[T, num_heads]``, or with rule "kda" ``[T, num_heads, key_dim]``
            The decay g, at most 0.
        beta : float32 ``[T, num_heads]``, optional
            Needed by the rules "gated_delta" and "kda", and not taken by others.
        scale : float
            Factor on q.

        Returns
        -------
        o : ``[T, num_heads, value_dim]``

        Raises
        ------
        ValueError
            If a tensor has another number of dimensions or another dtype.
        """
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            _check(name, tensor, (3,), q.dtype)
        _check("log_decay", log_decay, (2, 3), "float32")
        tensors = [q, k, v, log_decay]
        if beta is not None:
            _check("beta", beta, (2,), "float32")
            tensors.append(beta)
        return self._call("pagedkv.recurrent", (layer_id, float(scale)), tensors, v)

    def conv(self, layer_id: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve the rows of this step with those before them, for each channel by itself.

        Parameters
        ----------
        layer_id : int
            A layer with a `ConvConfig`, which has the activation.
        x : ``[T, channels]``
        weight : ``[channels, width]``
            Column ``width - 1`` multiplies the row itself, and column 0 the earliest one.
        bias : ``[channels]``, optional
            Needed where the layer's `ConvConfig` has one.

        Returns
        -------
        o : ``[T, channels]``

        Raises
        ------
        ValueError
            If a tensor has another number of dimensions or another dtype.
        """
        _check("x", x, (2,), x.dtype)
        _check("weight", weight, (2,), x.dtype)
        tensors = [x, weight]
        if bias is not None:
            _check("bias", bias, (1,), x.dtype)
            tensors.append(bias)
        return self._call("pagedkv.conv", (layer_id,), tensors, x)

    def _call(
        self, name: str, scalars: Sequence[Any], tensors: Sequence[Tensor], out: Tensor
    ) -> Tensor:
        """Emit a call whose last argument is the output, which is like `out`."""
        arguments = [*map(relax.prim_value, scalars), *(tensor._expr for tensor in tensors)]
        call = relax.call_dps_packed(
            name, [self._expr, *arguments], out_ty=relax.TensorType(out.shape, out.dtype)
        )
        return Tensor(_expr=relax.BlockBuilder.current().emit(call))


def _check(name: str, tensor: Tensor, ndims: tuple[int, ...], dtype: str) -> None:
    if len(tensor.shape) not in ndims or tensor.dtype != dtype:
        expected = " or ".join(map(str, ndims))
        raise ValueError(
            f"{name} must be of type {dtype} and have {expected} dimensions, got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
