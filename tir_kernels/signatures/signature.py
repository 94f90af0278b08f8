# SPDX-License-Identifier: Apache-2.0
"""The signature of a kernel: which arguments it takes, in which order, and how they are matched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm.script import tirx as T

from ..define import F32, I32, aligned
from ..layout import match_pages
from ..script import name_value
from ..spec import KernelSpec
from .arguments import PAGES, Argument, Lengths, arguments_of
from .sizes import Sizes


@dataclass(frozen=True)
class Signature:
    """The arguments of a kernel in the order in which it is called.

    Parameters
    ----------
    inputs : type
        The dataclass that declares the arguments, and that a kernel gets them in.
    names : tuple of str
        Fields of `inputs`. A spec may do without some of them, see `Argument.needs`.
    lengths : Lengths, optional
        The form of the argument `length_info`, in kernels that have it.
    has_one_row : bool
        Whether each sequence has one row of Q.
    """

    inputs: type
    names: tuple[str, ...]
    lengths: Lengths | None = None
    has_one_row: bool = False

    def __post_init__(self):
        unknown = set(self.names) - set(arguments_of(self.inputs))
        if unknown:
            raise ValueError(f"{self.inputs.__name__} declares no {', '.join(sorted(unknown))}")

    def without(self, *names: str, lengths: Lengths | None = None) -> Signature:
        """Return the signature without some arguments, and with a form of `length_info`."""
        unknown = set(names) - set(self.names)
        if unknown:
            raise ValueError(f"the signature has no {', '.join(sorted(unknown))}")
        kept = tuple(name for name in self.names if name not in names)
        return replace(self, names=kept, lengths=lengths or self.lengths)

    def of(self, spec: KernelSpec, pages: KernelSpec | None = None) -> KernelArguments:
        """Return the arguments of a kernel, as ``@prim_func(arguments=...)`` takes them.

        Parameters
        ----------
        spec : KernelSpec
        pages : KernelSpec, optional
            The spec that pages are laid out by, if it is another one.
        """
        return KernelArguments(self, spec, pages or spec)


class KernelArguments:
    """The arguments of a kernel for a spec.

    Parameters
    ----------
    signature : Signature
    spec, page_spec : KernelSpec
        As `Signature.of` has them.

    Attributes
    ----------
    dtypes : dict
        Name -> type of a parameter in TVMScript, in their order.
    """

    def __init__(self, signature: Signature, spec: KernelSpec, page_spec: KernelSpec):
        self._signature, self._spec, self._page_spec = signature, spec, page_spec
        known = arguments_of(signature.inputs)
        self._arguments = {
            name: known[name]
            for name in signature.names
            if known[name].needs is None or known[name].needs(spec)
        }
        self.dtypes = {name: each.parameter_dtype for name, each in self._arguments.items()}

    def match(self, **parameters) -> Any:
        """Match the parameters of a kernel; return them in the dataclass of the signature."""
        signature, spec = self._signature, self._spec
        num_heads, num_kv_heads = spec.num_qo_heads, spec.num_kv_heads
        of_spec = {
            "Hq": num_heads,
            "Hk": num_kv_heads,
            "Hq + 2 Hk": num_heads + 2 * num_kv_heads,
            "Dqk": spec.qk_head_dim,
            "2 Dqk": 2 * spec.qk_head_dim,
            "Dv": spec.v_head_dim,
        }
        sizes = Sizes(
            of_spec,
            has_batch_size=signature.has_one_row or signature.lengths is not None,
            has_one_row=signature.has_one_row,
        )
        matched = {
            name: name_value(name, self._match(argument, parameters[name], sizes))
            for name, argument in self._arguments.items()
        }
        known = {"batch_size": sizes["B"], "length_form": signature.lengths}
        return signature.inputs(**known, **matched)

    def _match(self, argument: Argument, value, sizes: Sizes):
        """Match an array with its shape; a scalar is its value."""
        if not argument.shape:
            return value
        if argument.dtype == PAGES:
            return match_pages(value, sizes["P"], self._page_spec)
        is_lengths = argument.shape == ("lengths",)
        letters = self._signature.lengths.value if is_lengths else argument.shape
        shape = [sizes[letter] for letter in letters]
        if argument.dtype == "int32":
            return T.match_buffer(value, shape, elem_offset=T.int32(), **I32)
        if argument.dtype == "float32":
            return T.match_buffer(value, shape, elem_offset=T.int64(), **F32)
        options = aligned(self._spec, self._spec.dtype)
        return T.match_buffer(value, shape, elem_offset=T.int64(), **options)
