# SPDX-License-Identifier: Apache-2.0
"""The signature of a kernel: which arguments it takes, in which order, and how they are matched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm.script import tirx as T

from ..conv_spec import ConvSpec
from ..define import F32, I32, aligned
from ..ingredients import match_ingredients
from ..layout import match_pages
from ..recurrent_spec import RecurrentSpec
from ..script import name_value
from ..spec import KernelSpec
from .arguments import PAGES, Argument, Lengths, arguments_of
from .inputs import AttentionInputs
from .sizes import Sizes, sizes_of

Spec = KernelSpec | RecurrentSpec | ConvSpec


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
        The form of the argument `lengths`, in kernels that have it.
    has_one_row : bool
        Whether each sequence has one row of Q, so that T is B.
    count_dtype : str
        Type of the sizes that a call decides.
    """

    inputs: type
    names: tuple[str, ...]
    lengths: Lengths | None = None
    has_one_row: bool = False
    count_dtype: str = "int32"

    def __post_init__(self):
        unknown = set(self.names) - set(arguments_of(self.inputs))
        if unknown:
            raise ValueError(f"{self.inputs.__name__} declares no {', '.join(sorted(unknown))}")

    def argument(self, name: str) -> Argument:
        """Return the declaration of an argument."""
        return arguments_of(self.inputs)[name]

    def without(self, *names: str, lengths: Lengths | None = None) -> Signature:
        """Return the signature without some arguments, and with a form of `lengths`."""
        unknown = set(names) - set(self.names)
        if unknown:
            raise ValueError(f"the signature has no {', '.join(sorted(unknown))}")
        kept = tuple(name for name in self.names if name not in names)
        return replace(self, names=kept, lengths=lengths or self.lengths)

    def of(self, spec: Spec, pages: KernelSpec | None = None) -> KernelArguments:
        """Return the arguments of a kernel, as ``@prim_func(arguments=...)`` takes them.

        Parameters
        ----------
        spec : KernelSpec, RecurrentSpec or ConvSpec
        pages : KernelSpec, optional
            The spec that pages are laid out by, if it is another one.
        """
        return KernelArguments(self, spec, pages or spec)


class KernelArguments:
    """The arguments of a kernel for a spec.

    Parameters
    ----------
    signature : Signature
    spec, page_spec
        As `Signature.of` has them.

    Attributes
    ----------
    dtypes : dict
        Name -> type of a parameter in TVMScript, in their order.
    """

    def __init__(self, signature: Signature, spec: Spec, page_spec: Spec):
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
        sizes = self._sizes(parameters)
        matched = {
            name: name_value(name, self._match(argument, parameters[name], sizes))
            for name, argument in self._arguments.items()
        }
        if issubclass(self._signature.inputs, AttentionInputs):
            matched |= {"batch_size": sizes["B"], "length_form": self._signature.lengths}
        return self._signature.inputs(**matched)

    def _sizes(self, parameters: dict[str, Any]) -> Sizes:
        signature = self._signature
        lengths, has_one_row = signature.lengths, signature.has_one_row
        is_told = "batch_size" in parameters
        sizes = Sizes(
            sizes_of(self._spec),
            has_batch_size=has_one_row or lengths is not None or is_told,
            count_dtype=signature.count_dtype,
        )
        if is_told:
            sizes["B"] = T.cast(parameters["batch_size"], signature.count_dtype)
        if has_one_row:
            sizes["T"] = sizes["B"]
        if lengths is not None:
            sizes["lengths"] = tuple(sizes.shape(lengths.value))
        return sizes

    def _match(self, argument: Argument, value, sizes: Sizes):
        """Match an array with its shape; a scalar is its value."""
        if not argument.shape:
            return value
        if argument.dtype == PAGES:
            spec = self._page_spec
            match = match_ingredients if isinstance(spec, RecurrentSpec) else match_pages
            return match(value, sizes["P"], spec)
        shape = sizes.shape(argument.shape)
        if argument.dtype == "int32":
            return T.match_buffer(value, shape, elem_offset=T.int32(), **I32)
        if argument.dtype == "float32":
            return T.match_buffer(value, shape, elem_offset=T.int64(), **F32)
        options = aligned(self._spec, getattr(self._spec, argument.dtype))
        return T.match_buffer(value, shape, elem_offset=T.int64(), **options)
