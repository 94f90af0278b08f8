# SPDX-License-Identifier: Apache-2.0
"""The signature of a kernel: which arguments it takes, in which order, and how they are matched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm.script import tirx as T

from ..define import F32, I32, aligned
from ..layout import first_element, match_pages
from ..script import name_value
from ..spec import KernelSpec
from .inputs import PAGES, Argument, AttentionInputs, Lengths, arguments_of

# Letters of sizes that a call decides, and what errors call them. Others are named as they are.
VARIABLES = {
    "T": "num_rows",  # of a step
    "B": "batch_size",  # sequences, or shared segments
    "B + 1": "num_starts",  # CSR offsets
    "S": "num_columns",  # rows of ragged K and V
    "P": "num_pages",  # of the pool
    "N": "num_page_ids",
    "M": "num_nodes",  # of trees
    "R": "num_row_ids",  # rows of shared segments
    "L": "num_lengths",
    "C": "num_lists",  # of blocks, of a row
    "W": "list_width",
}


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

    def of(self, spec: Any, pages: KernelSpec | None = None) -> KernelArguments:
        """Return the arguments of a kernel, as ``@prim_func(arguments=...)`` takes them.

        Parameters
        ----------
        spec
            A spec, whose `sizes` are those in the shapes.
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

    def __init__(self, signature: Signature, spec: Any, page_spec: KernelSpec):
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
            self._spec.sizes,
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
            return match_pages(value, sizes["P"], self._page_spec)
        shape = sizes.shape(argument.shape)
        if argument.dtype == "int32":
            return T.match_buffer(value, shape, elem_offset=T.int32(), **I32)
        if argument.dtype == "float32":
            return T.match_buffer(value, shape, elem_offset=first_element(), **F32)
        dtype = getattr(self._spec, argument.dtype)
        options = aligned(self._spec, dtype, argument.min_align)
        return T.match_buffer(value, shape, elem_offset=first_element(), **options)


class Sizes(dict):
    """The sizes of a call.

    Parameters
    ----------
    known : dict
        Those that are known beforehand.
    has_batch_size : bool
        Whether an array of B elements tells B. Otherwise CSR offsets do.
    count_dtype : str
        Type of the variables; the number of pages is int32.
    """

    def __init__(self, known: dict[str, Any], *, has_batch_size: bool, count_dtype: str):
        super().__init__(known)
        self.has_batch_size, self.count_dtype = has_batch_size, count_dtype

    def __missing__(self, size: str) -> Any:
        if size.isdigit():
            return int(size)
        if size == "B" and not self.has_batch_size:
            value = self["B + 1"] - 1
        elif size.endswith(" + 1") and (size != "B + 1" or self.has_batch_size):
            value = self[size.removesuffix(" + 1")] + 1
        else:
            dtype = "int32" if size == "P" else self.count_dtype
            value = name_value(VARIABLES.get(size, size), getattr(T, dtype)())
        self[size] = value
        return value

    def shape(self, sizes: tuple[str, ...]) -> list:
        """Return the sizes of an array."""
        values = [self[size] for size in sizes]
        return [n for value in values for n in (value if isinstance(value, tuple) else (value,))]
