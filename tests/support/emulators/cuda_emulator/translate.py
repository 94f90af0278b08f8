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
_INT_ARRAY = re.compile(r"\bint\* __restrict__ (?P<name>\w+_ptr)\b")
_ASSEMBLY = re.compile(r'asm(?: volatile)?\s*\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')
_BRANCH = re.compile(
    r"^(?P<value> *[\w ]+ condval(?:_\d+)?;\n)?"
    r"(?P<begin> *(?:} else )?if \()(?P<condition>.+)(?P<end>\) \{(?: break; })?)$",
    re.MULTILINE,
)
_LOOP = re.compile(
    r"^(?P<begin> *for \([^;]*; )(?P<condition>[^;]*)(?P<end>; [^;]*\) \{)$", re.MULTILINE
)
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_DYNAMIC_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];")
_HOST_BEGIN = "#include <tvm/ffi/c_api.h>"
_LAUNCHER_END = "  return 0;\n  } catch (...) {"
_FINISH = (
    "::tvm_cuda_host_check(emulator::RunSubmitted(/*launcher_ends=*/true)"
    " ? cudaSuccess : cudaErrorLaunchFailure, true)"
)


def translate(source: str, *, on_device: bool = False) -> str:
    """Translate what ``tvm.backend.cuda.export_cuda_host`` returns.

    Parameters
    ----------
    source : str
    on_device : bool
        The launchers take tensors of the emulated device, and launch on its streams.

    Raises
    ------
    NotImplementedError
        For instructions and kinds of shared memory that the emulator does not know.
    """
    begin = source.index(_HOST_BEGIN)
    device, host = source[:begin], source[begin:]
    helpers = [_helper(match) for match in _HELPER.finditer(device)]
    kernels = [_kernel(text) for text in _KERNEL.findall(device)]
    define = "#define EMULATOR_ON_DEVICE\n" if on_device else ""
    parts = [f'{define}#include "cuda.h"', *helpers, *kernels, _host(host, on_device)]
    return "\n".join(parts)


def _helper(match: re.Match) -> str:
    body = match["line"] or match["lines"]
    assembly = _ASSEMBLY.search(body)
    if assembly:
        text = "".join(_STRING.findall(assembly[1])).strip()
        names = [p.split()[-1].lstrip("&*") for p in match["parameters"].split(",") if p.strip()]
        body = emulate(text, names)
    parameters = match["parameters"]
    if "wgmma" in match["name"]:  # it reads registers later
        parameters = re.sub(r"(uint\w+) (__a\d)\b", r"\1& \2", parameters)
    return f"static inline {match['type']} {match['name']}({parameters}) {{ {body} }}"


def _kernel(text: str) -> str:
    text = _INT_ARRAY.sub(lambda match: _read_only(match, text), text)
    text = _DYNAMIC_SHARED.sub(r"\1* \2 = (\1*)emulator::SharedBase();", text)
    if "__shared__" in text:
        raise NotImplementedError("the emulator knows dynamic shared memory only")
    return _BRANCH.sub(_note_branch, _LOOP.sub(_note_branch, text))


def _read_only(match: re.Match, kernel: str) -> str:
    """Declare an int32 array constant that the kernel only reads; C++ sees to it."""
    name = match["name"]
    num_uses = len(re.findall(rf"\b{name}\b", kernel)) - 1
    num_elements = len(re.findall(rf"(?<!&)\b{name}\[", kernel))
    is_written = re.search(rf"^ *{name}\[.*\] = ", kernel, re.MULTILINE)
    is_const = num_uses == num_elements and not is_written
    return ("const " if is_const else "") + match[0]


def _note_branch(match: re.Match) -> str:
    """Let the emulator know which way a thread takes; see `MeetInWarp`."""
    if match.groupdict().get("value"):
        return match[0]  # it chooses a value: machine code selects, and does not branch
    return f"{match['begin']}emulator::Branch({match['condition']}){match['end']}"


def _host(text: str, on_device: bool) -> str:
    text = re.sub(r"^#include .*$", "", text, flags=re.MULTILINE)
    text = text.replace(_LAUNCHER_END, _LAUNCHER_END.replace("0", _FINISH, 1))
    if on_device:
        return text
    # DLPack numbers CUDA 2 and the CPU 1.
    return re.sub(r"(device\.device_type\)+ == )2\)", r"\g<1>1)", text)
