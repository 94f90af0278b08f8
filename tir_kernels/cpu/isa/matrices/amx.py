# SPDX-License-Identifier: Apache-2.0
"""The tile registers of AMX: what kernels ask of them, as calls of LLVM functions.

There are eight tiles of 16 rows of 64 bytes. Four of them are the sums of a product, two rows of
tiles by two columns; two take a part of A, the rest a part of B::

    sums  0 1     A 4     B 6 7
          2 3       5

A row of A has 16 elements: pairs of bfloat16, neighbours along the summed axis. A row of B has such
an element for each of 16 columns. So a step of a product takes 16 elements, and what is short of
that has to be zero in both. Sums are float32.

A kernel emits nothing but calls of the functions of `Tiles`, whose text is `LLVM_HELPERS`. The
tests, which have no AMX, call a model of the tiles by the same names instead.
"""

from __future__ import annotations

from tvm.script import tirx as T

SIDE = 16  # rows of a tile, and its elements of four bytes in a row
ELEMENT_BYTES = 4
SUMS, A_TILES, B_TILES = 4, (4, 5), (6, 7)

# 64 bytes: palette 1, then from byte 16 on the bytes of a row of each tile, from 48 on its rows.
CONFIG = bytes(
    [1]
    + [0] * 15
    + [byte for tile in range(8) for byte in (SIDE * ELEMENT_BYTES, 0)]
    + [0] * 16
    + [SIDE] * 8
    + [0] * 8
)
_DOT = "tdpbf16ps"


def _helpers() -> str:
    """Return the LLVM functions: linkonce_odr, for several kernels of a module may bring them."""
    config = "".join(f"\\{byte:02X}" for byte in CONFIG)
    functions = [
        ("begin", "", "ldtilecfg(ptr @pagedkv_tile_config)"),
        ("end", "", "tilerelease()"),
    ]
    for tile in range(SUMS):
        functions += [
            (f"zero_{tile}", "", f"tilezero(i8 {tile})"),
            (f"store_{tile}", "ptr %at, i64 %step", f"tilestored64(i8 {tile}, ptr %at, i64 %step)"),
        ]
        tiles = f"(i8 {tile}, i8 {A_TILES[tile // 2]}, i8 {B_TILES[tile % 2]})"
        functions.append((f"dot_{tile}", "", _DOT + tiles))
    for tile in range(8):
        load = f"tileloadd64(i8 {tile}, ptr %at, i64 %step)"
        functions.append((f"load_{tile}", "ptr %at, i64 %step", load))
    bodies = [
        f"define linkonce_odr i32 @pagedkv_tile_{name}({arguments}) #0 {{\n"
        f"  call void @llvm.x86.{call}\n  ret i32 0\n}}"
        for name, arguments, call in functions
    ]
    memory = ("i8 immarg", "ptr", "i64")
    declared = {
        "ldtilecfg": ("ptr",),
        "tilerelease": (),
        "tilezero": ("i8 immarg",),
        "tileloadd64": memory,
        "tilestored64": memory,
        _DOT: ("i8 immarg",) * 3,
    }
    return "\n".join(
        [
            "@pagedkv_tile_config = linkonce_odr hidden constant "
            f'[{len(CONFIG)} x i8] c"{config}", align 64',
            *bodies,
            *(f"declare void @llvm.x86.{n}({', '.join(a)})" for n, a in declared.items()),
            "attributes #0 = { alwaysinline nounwind }",
        ]
    )


LLVM_HELPERS = _helpers()


class Tiles:
    """The operations on tiles, as statements of a kernel.

    A task begins, multiplies, and ends. Between two products the tiles keep nothing that a caller
    relies on, except for the sums.
    """

    @staticmethod
    def begin() -> None:
        """Configure the tiles: once a task, before anything else."""
        _call("begin")

    @staticmethod
    def end() -> None:
        """Release the tiles: a thread that keeps them has a larger state to save."""
        _call("end")

    @staticmethod
    def zero(tile: int) -> None:
        """Set a tile of sums to zeros."""
        _call(f"zero_{tile}")

    @staticmethod
    def load(tile: int, buffer, index, row_elements) -> None:
        """Load a tile from an element of a buffer on, whose rows are `row_elements` apart."""
        _call(f"load_{tile}", *_place(buffer, index, row_elements))

    @staticmethod
    def store(tile: int, buffer, index, row_elements) -> None:
        """Store a tile of sums as `load` loads one."""
        _call(f"store_{tile}", *_place(buffer, index, row_elements))

    @staticmethod
    def dot(tile: int) -> None:
        """Add to a tile of sums the product of A in its row of tiles and B in its column."""
        _call(f"dot_{tile}")


def _call(name: str, *arguments) -> None:
    T.evaluate(T.call_extern("int32", f"pagedkv_tile_{name}", *arguments))


def _place(buffer, index, row_elements) -> tuple:
    step = T.cast(row_elements, "int64") * ELEMENT_BYTES
    return T.address_of(buffer[tuple(index)]), step
