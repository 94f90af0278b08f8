# SPDX-License-Identifier: Apache-2.0
"""Generated CUDA C++, kernels and launchers, to C++ that runs on the emulator.

The kernels and the launchers stay as they are. Device functions that wrap an instruction get
another body, shared memory another address, and tensors are expected on the CPU.
"""

from __future__ import annotations

import re

from .ptx import emulate

_HELPER = re.compile(
    r"^(?:__forceinline__ __device__|__device__ __forceinline__|static __device__ __forceinline__) "
    r"(?P<type>[\w ]+?) (?P<name>\w+)\((?P<parameters>[^)]*)\) *\{"
    r"(?:(?P<line>[^\n]+)\}\n|(?P<lines>.*?)^\}\n)",
    re.MULTILINE | re.DOTALL,
)
_KERNEL = re.compile(r'^extern "C" __global__ void [^;{]*\{.*?^\}\n', re.MULTILINE | re.DOTALL)
_ASSEMBLY = re.compile(r'asm(?: volatile)?\s*\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_DYNAMIC_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];")
_HOST_BEGIN = "#include <tvm/ffi/c_api.h>"


def translate(source: str) -> str:
    """Translate what ``tvm.backend.cuda.export_cuda_host`` returns.

    Raises
    ------
    NotImplementedError
        For instructions and kinds of shared memory that the emulator does not know.
    """
    begin = source.index(_HOST_BEGIN)
    device, host = source[:begin], source[begin:]
    helpers = [_helper(match) for match in _HELPER.finditer(device)]
    kernels = [_kernel(text) for text in _KERNEL.findall(device)]
    return "\n".join(['#include "cuda.h"', *helpers, *kernels, _host(host)])


def _helper(match: re.Match) -> str:
    body = match["line"] or match["lines"]
    assembly = _ASSEMBLY.search(body)
    if assembly:
        text = "".join(_STRING.findall(assembly[1])).strip()
        names = [p.split()[-1].lstrip("&*") for p in match["parameters"].split(",") if p.strip()]
        body = emulate(text, names)
    return f"static inline {match['type']} {match['name']}({match['parameters']}) {{ {body} }}"


def _kernel(text: str) -> str:
    text = _DYNAMIC_SHARED.sub(r"\1* \2 = (\1*)emulator::SharedBase();", text)
    if "__shared__" in text:
        raise NotImplementedError("the emulator knows dynamic shared memory only")
    return text


def _host(text: str) -> str:
    text = re.sub(r"^#include .*$", "", text, flags=re.MULTILINE)
    # DLPack numbers CUDA 2 and the CPU 1.
    return re.sub(r"(device\.device_type\)+ == )2\)", r"\g<1>1)", text)
