# SPDX-License-Identifier: Apache-2.0
"""PTX instructions as C++ statements over the emulator's functions.

Generated code wraps each instruction in a device function, so what an instruction does here is the
body of that function, in terms of the names of its parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_FLOAT_TYPES = {"f16": "emulator::kFloat16", "bf16": "emulator::kBFloat16"}
_WORD_BYTES = {"b16": 2, "b32": 4, "u32": 4, "f32": 4, "b64": 8}


def emulate(text: str, operands: list[str]) -> str:
    """C++ statements that do what an instruction does.

    Parameters
    ----------
    text : str
        The instruction, as inline assembly has it.
    operands : list of str
        Names of the parameters of the function around it: destinations first.

    Raises
    ------
    NotImplementedError
        For an instruction that the emulator does not know.
    """
    for pattern, body in _INSTRUCTIONS:
        match = re.match(pattern, text)
        if match:
            return body(match, operands)
    raise NotImplementedError(f"the emulator does not know the instruction {text!r}")


def _nothing(match, operands) -> str:
    return ""


def _copy_async(match, operands) -> str:
    size = match[1]
    source_bytes = operands[2] if len(operands) > 2 else size
    to, source = operands[:2]
    return f"emulator::CopyAsync({to}, {source}, {size}, {source_bytes});"


def _wait_group(match, operands) -> str:
    return f"emulator::WaitForCopies({match[1]});"


def _wait_all(match, operands) -> str:
    return "emulator::CommitCopies(); emulator::WaitForCopies(0);"


def _load_matrices(match, operands) -> str:
    count = int(match[1])
    registers = ", ".join(f"&{name}" for name in operands[:count])
    transposed = "true" if match[2] else "false"
    return (
        f"uint32_t* registers[] = {{{registers}}}; "
        f"emulator::LoadMatrices(registers, {count}, {transposed}, {operands[count]});"
    )


def _multiply_matrices(match, operands) -> str:
    d, a, b, c = operands[:4], operands[4:8], operands[8:10], operands[10:14]
    arrays = (
        ("float* d", [f"&{name}" for name in d]),
        ("uint32_t a", a),
        ("uint32_t b", b),
        ("float c", c),
    )
    made = " ".join(f"{name}[] = {{{', '.join(values)}}};" for name, values in arrays)
    return f"{made} emulator::MultiplyMatrices(d, a, b, c, {_FLOAT_TYPES[match[1]]});"


def _multiply_together(match, operands) -> str:
    columns, count = int(match[1]), int(match[1]) // 2
    d, rest = operands[:count], operands[count:]
    sums = f"float* d[] = {{{', '.join(f'&{name}' for name in d)}}};"
    *a, b, adds = rest
    if len(a) > 1:  # A in registers, which are read when the products are waited for
        words = f"const uint32_t* a[] = {{{', '.join(f'&{name}' for name in a)}}};"
        begin, is_transposed = "0", match[3]
    else:
        if match[3] != "0":
            raise NotImplementedError("the emulator does not know a transposed A of wgmma")
        words, begin, is_transposed = "const uint32_t** a = nullptr;", a[0], match[4]
    return (
        f"{sums} {words} emulator::MultiplyTogether(d, {columns}, a, {begin}, {b}, "
        f"{is_transposed}, {adds}, {_FLOAT_TYPES[match[2]]});"
    )


def _pack(match, operands) -> str:
    word, high, low = operands
    halves = (f"emulator::Narrow({x}, {_FLOAT_TYPES[match[1]]})" for x in (high, low))
    return "{} = uint32_t{{{}}} << 16 | {};".format(word, *halves)


def _widen(match, operands) -> str:
    return f"{operands[0]} = emulator::Widen({operands[1]}, {_FLOAT_TYPES[match[1]]});"


def _num_words(match) -> int:
    return int(match[1] or 1)


def _copy(to: str, source: str, size: int) -> str:
    return f"std::memcpy({to}, {source}, {size});"


def _load(match, operands) -> str:
    count, size = _num_words(match), _WORD_BYTES[match[2]]
    *words, source = operands
    parts = [_copy(f"&{w}", f"values + {i * size}", size) for i, w in enumerate(words)]
    loaded = f"char values[{count * size}]; emulator::Load(values, {source}, {count * size});"
    return " ".join([loaded, *parts])


def _store(match, operands) -> str:
    count, size = _num_words(match), _WORD_BYTES[match[2]]
    to, *words = operands
    parts = [_copy(f"values + {i * size}", f"&{w}", size) for i, w in enumerate(words)]
    stored = f"emulator::Store((void*){to}, values, {count * size});"
    return " ".join([f"char values[{count * size}];", *parts, stored])


def _load_shared(match, operands) -> str:
    count, size = _num_words(match), _WORD_BYTES[match[2]]
    *words, address = operands
    parts = [_copy(f"&{w}", f"values + {i * size}", size) for i, w in enumerate(words)]
    loaded = f"emulator::LoadShared(values, {address}, {count * size});"
    return " ".join([f"char values[{count * size}];", loaded, *parts])


def _store_shared(match, operands) -> str:
    count, size = _num_words(match), _WORD_BYTES[match[2]]
    address, *words = operands
    parts = [_copy(f"values + {i * size}", f"&{w}", size) for i, w in enumerate(words)]
    stored = f"emulator::StoreShared({address}, values, {count * size});"
    return " ".join([f"char values[{count * size}];", *parts, stored])


def _permute(match, operands) -> str:
    return "{} = emulator::PermuteBytes({}, {}, {});".format(*operands)


def _fma_pairs(match, operands) -> str:
    to, *factors = operands
    return f"{to} = emulator::FmaPairs({', '.join(factors)}, {_FLOAT_TYPES[match[1]]});"


def _function(name: str) -> Callable:
    return lambda match, operands: f"{operands[0]} = {name}({', '.join(operands[1:])});"


_VECTOR = r"(?:\.v(\d))?\.(\w\d\d)\b"
_INSTRUCTIONS: list[tuple[str, Callable]] = [
    (r"cp\.async\.c[ag]\.shared\.global.*?\[%1\], (\d+)", _copy_async),
    (r"cp\.async\.commit_group", lambda match, operands: "emulator::CommitCopies();"),
    (r"cp\.async\.wait_group (\d+)", _wait_group),
    (r"cp\.async\.wait_all", _wait_all),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.shared\.b16", _load_matrices),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(b?f16)\.b?f16\.f32", _multiply_matrices),
    (
        r".*wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)\.b?f16 "
        r".*, 1, 1, ([01])(?:, ([01]))?;",
        _multiply_together,
    ),
    (r"wgmma\.commit_group", lambda match, operands: "emulator::CommitProducts();"),
    (
        r"wgmma\.wait_group\.sync\.aligned (\d+)",
        lambda match, operands: f"emulator::WaitForProducts({match[1]});",
    ),
    (r"wgmma\.fence", lambda match, operands: "emulator::FenceProducts();"),
    (r"$", _nothing),
    (r"fence\.proxy\.async", lambda match, operands: "emulator::PublishShared();"),
    (r"cvt\.rn\.(b?f16)x2\.f32", _pack),
    (r"cvt\.f32\.(b?f16)", _widen),
    (r"ld\.global(?:\.nc)?(?:\.L1::\w+)?" + _VECTOR, _load),
    (r"st\.global" + _VECTOR, _store),
    (r"ld\.shared" + _VECTOR, _load_shared),
    (r"st\.shared" + _VECTOR, _store_shared),
    (r"ex2\.approx", _function("exp2f")),
    (r"lg2\.approx", _function("log2f")),
    (r"prmt\.b32", _permute),
    (r"fma\.rn\.(b?f16)x2", _fma_pairs),
    (r"fma\.rn\.f32", _function("fmaf")),
    (r"div\.rn\.f32", lambda match, operands: "{} = {} / {};".format(*operands)),
    (r"cvt\.rni\.f32\.f32", _function("rintf")),
    (r"mov\.b32", lambda match, operands: _copy(f"&{operands[0]}", f"&{operands[1]}", 4)),
    (r"tanh\.approx", _function("tanhf")),
    (r"rcp\.approx", _function("1.0f / ")),
    (r"griddepcontrol\.wait", lambda match, operands: "emulator::WaitForGridBefore();"),
    (r"prefetch|griddepcontrol\.launch_dependents|fence", _nothing),
]
