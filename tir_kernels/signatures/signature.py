# SPDX-License-Identifier: Apache-2.0
"""The signature of a kernel: which arguments it takes, in which order, and how they are matched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..script import name_value
from ..spec import KernelSpec
from .arguments import Lengths, Sizes, arguments_of


@dataclass(frozen=True)
class Signature:
    """The arguments of a kernel in the order in which it is called.

    Parameters
    ----------
    inputs : type
        The dataclass that declares the arguments, and that a kernel gets them in.
    names : tuple of str
        Fields of `inputs`. A spec may do without some of them, see `Argument.needs`.
    lengths : Lengths
        The form of the argument `lengths`.
    has_one_row : bool
        Whether each sequence has one row of Q: then T is B.
    """

    inputs: type
    names: tuple[str, ...]
    lengths: Lengths = Lengths.LAST_PAGE
    has_one_row: bool = False

    def __post_init__(self):
        known = arguments_of(self.inputs)
        unknown = [name for name in self.names if name not in known]
        if unknown:
            raise ValueError(f"{self.inputs.__name__} declares no {', '.join(unknown)}")

    def without(self, *names: str, lengths: Lengths | None = None) -> Signature:
        """Return the signature without some arguments, and with a form of `lengths`."""
        kept = tuple(name for name in self.names if name not in names)
        if len(kept) + len(names) != len(self.names):
            raise ValueError(f"of {', '.join(names)} some are no arguments of this signature")
        return replace(self, names=kept, lengths=lengths or self.lengths)

    def of(self, spec: KernelSpec) -> KernelArguments:
        """Return the arguments of a kernel for `spec`, as ``@prim_func(arguments=...)`` takes."""
        return KernelArguments(self, spec)


class KernelArguments:
    """The arguments of a kernel for a spec.

    Parameters
    ----------
    signature : Signature
    spec : KernelSpec

    Attributes
    ----------
    dtypes : dict
        Name -> type of a parameter in TVMScript, in their order.
    """

    def __init__(self, signature: Signature, spec: KernelSpec):
        self.signature, self.spec = signature, spec
        known = arguments_of(signature.inputs)
        self._arguments = {
            name: known[name]
            for name in signature.names
            if known[name].needs is None or known[name].needs(spec)
        }
        self.dtypes = {name: each.parameter_dtype for name, each in self._arguments.items()}

    def match(self, **parameters) -> Any:
        """Match the parameters of a kernel; return them in the dataclass of the signature."""
        has_lengths = "length_info" in self._arguments
        sizes = Sizes(self.spec, self.signature.lengths if has_lengths else None)
        if self.signature.has_one_row:
            sizes["T"] = sizes["B"]
        matched = {
            name: name_value(name, argument.match(parameters[name], sizes, self.spec))
            for name, argument in self._arguments.items()
        }
        return self.signature.inputs(
            batch_size=sizes["B"], length_form=self.signature.lengths, **matched
        )
