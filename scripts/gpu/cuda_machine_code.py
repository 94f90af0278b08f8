# SPDX-License-Identifier: Apache-2.0
"""Machine code of kernels for GPUs: registers, spills, shared memory, instructions.

It needs nvcc, but no GPU. Instructions are those of the machine code where there is nvdisasm, which
the extra "cuda" installs; of PTX otherwise.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tir_kernels.cuda.launches import BLOCK_SHARED_BYTES
from tvm_pagedkv.compiler.cuda import find_nvcc

# What is counted: instructions of the machine code, and of PTX.
INSTRUCTIONS = {
    "mma": (r"[A-Z]+MMA\b", r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\."),
    "wgmma": (r"HGMMA\b", r"wgmma\.mma_async\."),
    "ldgsts": (r"LDGSTS\b", r"cp\.async\.c[ag]\."),
    "ldsm": (r"LDSM\b", r"ldmatrix\."),
    "ldg.128": (r"LDG\b.*\.128\b", r"ld\.global\.(?:\w+\.)*v(?:4\.\w32|2\.\w64)"),
    "stg.128": (r"STG\b.*\.128\b", r"st\.global\.(?:\w+\.)*v(?:4\.\w32|2\.\w64)"),
    "local": (r"(?:LDL|STL)\b", r"(?:ld|st)\.local\."),
    "wait": (r"ACQBULK\b", r"griddepcontrol\.wait"),
    "next": (r"PREEXIT\b", r"griddepcontrol\.launch_dependents"),
    "constant": (r"LDG\b.*\.CONSTANT\b", r"ld\.global\.(?:\w+\.)*nc\."),
}
_GLOBAL_ACCESS = (
    r"(?:LDG|STG|LDGSTS|LD|ST|ATOMG?|RED)\b",
    r"(?:ld|st|atom|red|cp\.async)\.(?!shared|local|param)",
)

_UNKNOWN = "an argument that could not be found out"
_SIGNATURE = re.compile(r'^extern "C" __global__ void .*?(\w+)\(([^()]*)\) \{$', re.MULTILINE)
_ENTRY = re.compile(r"\.entry (\w+)")
# An instruction of PTX: its opcode, what it writes, what it reads.
_STEP = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(%\w+),\s*(.+);$", re.MULTILINE)
_HOST_PART = "#include <tvm/ffi/c_api.h>"
_BOUNDS = re.compile(r"__launch_bounds__\((\d+)(?:, \d+)?\) (\w+)\(")
_LAUNCHER = re.compile(r"^TVM_DLL int32_t __tvm_ffi_(\w+)\([^)]*\) \{$", re.MULTILINE)
# A condition of a launcher on what shared memory a block may have.
_ASKS = rf"(?<!int32_t ){BLOCK_SHARED_BYTES}\(\)"
_CONDITION = re.compile(rf"^( *)if \(\(?(\d+) <= {_ASKS}\)(?!.*\|\|).*\{{$", re.MULTILINE)
_LAUNCH = re.compile(r"tvm_cuda_host_launch\(::(\w+), &(\w+)")
_PROPERTIES = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*\n.*\n"
    r"\s*(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\n.*Used (?P<registers>\d+) registers(?P<rest>.*)"
)


@dataclass(frozen=True)
class Launch:
    """A kernel launch of a function.

    Parameters
    ----------
    function, kernel : str
        A function may launch several.
    grid : tuple of int or None
        Blocks; None where the arguments decide.
    threads : int
        Of a block.
    bound : int
        The most threads that the kernel is compiled for.
    dynamic_bytes : int
        Of shared memory.
    begins_early : bool
        Where the chip can, before the kernel before has ended.
    device_bytes : int
        It is launched where a block may have so many bytes of shared memory; 0: everywhere.
    """

    function: str
    kernel: str
    grid: tuple[int | None, ...]
    threads: int
    bound: int
    dynamic_bytes: int
    begins_early: bool
    device_bytes: int = 0


@dataclass(frozen=True)
class MachineCode:
    """A kernel, compiled for an architecture.

    Parameters
    ----------
    launch : Launch
    arch : str
        Its number, such as "90".
    registers, stack_bytes, spill_bytes : int
        Of a thread.
    static_bytes : int
        Of shared memory of a block, besides the launch's.
    counts : mapping
        Key of `INSTRUCTIONS` -> how many there are.
    num_instructions : int
        Of all kinds.
    early_accesses : int
        Instructions that may touch global memory, before the kernel waits for the one before:
        constant loads apart, which read nothing that kernels write.
    is_sass : bool
        Whether the instructions are of the machine code.
    constant_arguments : tuple of str
        Arguments, by their names in the source, that are read through the cache that other
        kernels' writes do not reach: ``ld.global.nc``, ``LDG.CONSTANT``.
    """

    launch: Launch
    arch: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    static_bytes: int
    counts: Mapping[str, int]
    num_instructions: int
    early_accesses: int
    is_sass: bool
    constant_arguments: tuple[str, ...] = ()

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory of a block."""
        return self.static_bytes + self.launch.dynamic_bytes


def find_nvdisasm() -> str | None:
    """The disassembler: beside nvcc, on PATH, or of the package nvidia-cuda-nvdisasm."""
    candidates = [str(Path(find_nvcc()).with_name("nvdisasm")), shutil.which("nvdisasm")]
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        files = []
    candidates += [str(file.locate()) for file in files if file.stem == "nvdisasm"]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def launches(source: str) -> list[Launch]:
    """The launches in what `cuda_source.cuda_source` returns.

    Raises
    ------
    RuntimeError
        For text whose launches have another form.
    """
    bounds = {kernel: int(threads) for threads, kernel in _BOUNDS.findall(source)}
    _, *parts = _LAUNCHER.split(source)
    found = []
    for function, text in zip(parts[::2], parts[1::2], strict=True):
        values = dict(re.findall(r"^ *(?:auto|size_t) (cuda_\w+) = (.*);$", text, re.MULTILINE))

        def number(name: str, values=values) -> int | None:
            value = values.get(name, name)
            value = re.sub(r"static_cast<size_t>\((.*)\)|\(int64_t\)", r"\1", value)
            if re.fullmatch(r"\d+", value):
                return int(value)
            return number(value) if value in values else None

        conditions = _conditions(text)
        for match in _LAUNCH.finditer(text):
            kernel, config = match.groups()
            grid, block = (
                [
                    number(x)
                    for x in re.search(rf"{config}\.{dim} = dim3\((.*)\);", text)[1].split(", ")
                ]
                for dim in ("gridDim", "blockDim")
            )
            dynamic = number(re.search(rf"{config}\.dynamicSmemBytes = (.*);", text)[1])
            if None in block or dynamic is None:
                raise RuntimeError(f"{kernel}: neither threads nor shared memory may vary")
            threads = block[0] * block[1] * block[2]
            early = f" {config}.numAttrs += " in text
            asked = [n for begin, end, n in conditions if begin <= match.start() < end]
            found.append(
                Launch(
                    *(function, kernel, tuple(grid), threads, bounds[kernel], dynamic, early),
                    device_bytes=max(asked, default=0),
                )
            )
    if {launch.kernel for launch in found} != set(bounds):
        raise RuntimeError(f"launches of {found}, but kernels {sorted(bounds)}")
    return found


def _conditions(launcher: str) -> list[tuple[int, int, int]]:
    """Return the ranges of a launcher that depend on the device's shared memory, and how."""
    found = []
    for match in _CONDITION.finditer(launcher):
        indent, num_bytes = match.groups()
        end = launcher.index(f"\n{indent}}}", match.end())
        found.append((match.end(), end, int(num_bytes)))
    if len(found) != len(re.findall(_ASKS, launcher)):
        raise RuntimeError(f"conditions on {BLOCK_SHARED_BYTES} have another form")
    return found


def machine_code(source: str, arch: str, ptxas_options: Sequence[str] = ()) -> list[MachineCode]:
    """Compile kernels as a library has them, and read what came out.

    Parameters
    ----------
    source : str
        What `cuda_source.cuda_source` returns.
    arch : str
        Number of an architecture, such as "90".
    ptxas_options : sequence of str
        Besides those of a library.

    Raises
    ------
    RuntimeError
        Without nvcc, or when one of the tools fails.
    """
    nvcc, nvdisasm = find_nvcc(), find_nvdisasm()
    all_launches = launches(source)
    with tempfile.TemporaryDirectory() as folder:
        text, ptx, cubin = (Path(folder) / f"kernels.{end}" for end in ("cu", "ptx", "cubin"))
        text.write_text(source[: source.index(_HOST_PART)])
        _run(nvcc, "-ptx", "-std=c++17", "-O3", "-w", f"-arch=compute_{arch}", text, "-o", ptx)
        ptxas = Path(nvcc).with_name("ptxas")
        told = _run(ptxas, "-v", f"-arch=sm_{arch}", *ptxas_options, ptx, "-o", cubin)
        constant = _constant_arguments(source, ptx.read_text())
        if nvdisasm is None:
            code = _ptx_opcodes(ptx.read_text())
        else:
            code = _sass_opcodes(json.loads(_run(nvdisasm, "-json", cubin)))
    properties = {match["kernel"]: match for match in _PROPERTIES.finditer(told)}
    found = []
    for launch in all_launches:
        match, opcodes = properties[launch.kernel], code[launch.kernel]
        static = re.search(r"(\d+) bytes smem", match["rest"])
        matches = {
            name: [bool(re.match(patterns[nvdisasm is None], opcode)) for opcode in opcodes]
            for name, patterns in {**INSTRUCTIONS, "global": _GLOBAL_ACCESS}.items()
        }
        first_wait = (matches["wait"] + [True]).index(True)
        found.append(
            MachineCode(
                launch=launch,
                arch=arch,
                registers=int(match["registers"]),
                stack_bytes=int(match["stack"]),
                spill_bytes=int(match["stores"]) + int(match["loads"]),
                static_bytes=int(static[1]) if static else 0,
                counts={name: sum(matches[name]) for name in INSTRUCTIONS},
                num_instructions=len(opcodes),
                early_accesses=sum(
                    is_global and not is_constant
                    for is_global, is_constant in zip(
                        matches["global"][:first_wait],
                        matches["constant"][:first_wait],
                        strict=True,
                    )
                ),
                is_sass=nvdisasm is not None,
                constant_arguments=constant[launch.kernel],
            )
        )
    return found


def _run(*command) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines()[-12:]
        raise RuntimeError(f"{Path(command[0]).name} failed:\n" + "\n".join(lines))
    return done.stdout + done.stderr


def _sass_opcodes(parsed: list) -> dict[str, list[str]]:
    return {
        function["function-name"]: [line["opcode"] for line in function["sass-instructions"]]
        for function in parsed[1]
    }


def _ptx_bodies(text: str) -> dict[str, str]:
    _, *parts = _ENTRY.split(text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _ptx_opcodes(text: str) -> dict[str, list[str]]:
    return {
        kernel: re.findall(r"(?<![\w.%$:])[a-z]\w*\.[\w.:]+", body)
        for kernel, body in _ptx_bodies(text).items()
    }


def _constant_arguments(source: str, ptx: str) -> dict[str, tuple[str, ...]]:
    """The arguments of each kernel that ``ld.global.nc`` reads, traced back through its registers.

    The machine code has as many loads of the kind or fewer: the assembler makes none of its own.
    """
    names = {
        kernel: [parameter.split()[-1].lstrip("*") for parameter in parameters.split(",")]
        for kernel, parameters in _SIGNATURE.findall(source)
    }
    return {
        kernel: _read_by_constant_loads(body, names[kernel])
        for kernel, body in _ptx_bodies(ptx).items()
    }


def _read_by_constant_loads(body: str, names: Sequence[str]) -> tuple[str, ...]:
    steps = [match.groups() for match in _STEP.finditer(body)]
    sources: dict[str, set[str]] = {}
    for opcode, target, operands in steps:
        if not opcode.startswith("ld.global"):  # what is loaded is no part of an address
            sources.setdefault(target, set()).update(re.findall(r"%?[\w$]+", operands))
    found = set()
    for address in re.findall(r"ld\.global\.(?:\w+\.)*nc\.[^\[]*\[(%\w+)", body):
        reached, left = set(), [address]
        while left:
            register = left.pop()
            if register not in reached:
                reached.add(register)
                left.extend(sources.get(register, ()))
        numbers = [int(x.rsplit("_", 1)[1]) for x in reached if "_param_" in x]
        pointers = {names[i] for i in numbers if names[i].endswith("_ptr")}
        if not any("pagedkv_table_" in x for x in reached):  # a table of constants in the code
            pointers = pointers or {_UNKNOWN}
        found |= pointers
    return tuple(sorted(name.removesuffix("_ptr") for name in found))
