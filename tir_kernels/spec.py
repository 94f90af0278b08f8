# SPDX-License-Identifier: Apache-2.0
"""Specs of kernels: frozen, hashable values that the builders close over."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar

from .codec import Codec, CodecPair, codec_of

FLOAT_DTYPES = ("float32", "float16", "bfloat16")
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
STORED_ITEMSIZE = ITEMSIZE | {"int8": 1, "uint8": 1, "uint16": 2}  # also of codes and scales


@dataclass(frozen=True)
class VectorTarget:
    """The traits of a CPU that shape the generated code.

    Parameters
    ----------
    lanes : int
        float32 lanes of a SIMD register: 16 (AVX-512), 8 (AVX2), 4 (NEON, SSE).
    registers : int
        Number of SIMD registers.
    has_bf16_dot : bool
        Whether ``vdpbf16ps`` on 512-bit registers may be used.
    has_vnni : bool
        Whether ``vpdpbusd`` on 512-bit registers may be used.
    has_sdot : bool
        Whether ``sdot`` of AArch64 may be used.
    has_smmla : bool
        Whether ``smmla`` of AArch64 may be used, together with ``sdot``.
    has_bfdot : bool
        Whether ``bfdot`` and ``bfmmla`` of AArch64 may be used.
    has_amx : bool
        Whether ``tdpbf16ps`` may be used, together with ``vdpbf16ps``.
    has_f16_convert : bool
        Whether float16 converts to and from float32 in hardware (F16C, AVX-512F, AArch64).
    slow_bf16_dot : bool
        Whether ``vdpbf16ps`` multiplies fewer numbers per second than float32 multiply-adds. Then
        only kernels that wait for memory use it: decode, and linear layers of a few rows where
        AMX multiplies many.
    has_word_dot : bool
        Whether ``vpmaddwd`` on 256-bit registers multiplies the codes of quantized pages and of
        quantized weights.
    fetches_streams : bool
        Whether the CPU itself fetches a long stream from memory as fast as it comes. Kernels that
        read weights in order then ask for every other cache line, into the L2 cache only.
    tile : (rows, vectors) or None
        The sums of a register tile of prefill: rows of Q or of weights, by vectors of columns, with
        no more than a vector of 64 positions left. With None, the tile suits the number of
        registers: 8 x 2 of 32, 6 x 2 of 16.

    Raises
    ------
    ValueError
        If vectors of `tile` leave more than one vector of 64 positions.
    """

    lanes: int = 16
    registers: int = 32
    has_bf16_dot: bool = False
    has_vnni: bool = False
    has_sdot: bool = False
    has_smmla: bool = False
    has_bfdot: bool = False
    has_amx: bool = False
    has_f16_convert: bool = True
    slow_bf16_dot: bool = False
    has_word_dot: bool = False
    fetches_streams: bool = False
    tile: tuple[int, int] | None = None

    def __post_init__(self):
        if self.tile and 64 // self.lanes % self.tile[1] > 1:
            raise ValueError(
                f"vectors of a tile may leave one vector of 64 positions, got tile={self.tile} "
                f"with {64 // self.lanes} vectors"
            )

    @property
    def multiplies_pairs(self) -> bool:
        """Whether products that reuse registers (prefill, linear layers) take bfloat16 pairs."""
        return self.has_bf16_dot and not self.slow_bf16_dot

    @property
    def tile_rows(self) -> int:
        """Rows of a register tile."""
        return self.tile[0] if self.tile else (8 if self.registers >= 32 else 6)

    @property
    def tile_vectors(self) -> int:
        """Vectors of a row of a register tile."""
        return self.tile[1] if self.tile else 2

    @property
    def is_neon(self) -> bool:
        """Whether the registers are those of AArch64, the only ones of 128 bits that are 32."""
        return self.lanes == 4 and self.registers == 32

    @property
    def has_byte_dot(self) -> bool:
        """Whether it multiplies bytes four at a time."""
        return self.has_vnni or self.has_sdot


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """The limits of a kind of GPU that shape the generated code.

    Parameters
    ----------
    max_shared_bytes : int
        Shared memory that a block may have on every GPU of the kind.
    larger_shared_bytes : tuple of int
        Shared memory that a block may have on some of them, in increasing order.
    max_threads : int
        Threads of a block.
    max_buffers : int or None
        Buffers that a kernel may bind; None: any number.
    subgroup : int or None
        Threads that exchange values by instructions; None: the kernels must not rely on any.
    loads : tuple of str, or None
        Element types that kernels may load and store; None: all. Others lie in words.
    wide_dtype : {"int64", "int32"}
        Type of counts and indices that may exceed 32 bits, where the target has such integers.
    """

    isa_module: ClassVar[str]  # with the instructions, see `gpu.isa`
    has_tensor_cores: ClassVar[bool] = False  # for two operands of float16, or of bfloat16
    multiplies_by_warpgroups = False  # whether four warps multiply together

    max_shared_bytes: int
    larger_shared_bytes: tuple[int, ...] = ()
    max_threads: int = 256
    max_buffers: int | None = None
    subgroup: int | None = None
    loads: tuple[str, ...] | None = None
    wide_dtype: str = "int64"


@dataclass(frozen=True)
class CudaTarget(GpuTarget):
    """A family of NVIDIA's GPUs.

    Parameters
    ----------
    family : str
        The lowest architecture that has the instructions. "sm_80" (``mma.sync``, ``cp.async``) runs
        on all later ones. "sm_90a" (``wgmma``) runs on Hopper only.
    limits : keyword arguments, see `GpuTarget`
        The defaults are those of every GPU from 80 on; 8.0, 9.0 and 10.0 have more shared memory.
    """

    isa_module: ClassVar[str] = "tir_kernels.cuda.isa"
    has_tensor_cores: ClassVar[bool] = True

    family: str = "sm_80"
    _: KW_ONLY
    max_shared_bytes: int = 99 * 1024
    larger_shared_bytes: tuple[int, ...] = (163 * 1024, 227 * 1024)
    max_threads: int = 1024
    subgroup: int | None = 32

    @property
    def multiplies_by_warpgroups(self) -> bool:
        """Whether the family has ``wgmma``."""
        return self.family == "sm_90a"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding as a kernel sees it.

    The pair of dimension ``i`` is ``i + rotary_dim // 2``.

    Parameters
    ----------
    theta : float
        The base.
    scale : float
        Factor on the position (linear scaling by a factor f is ``scale = 1 / f``).
    rotary_dim : int
        Leading dimensions that are rotated; the rest pass through.
    scaling : tuple of (str, value) pairs, or None
        A Hugging Face ``rope_scaling`` dictionary in canonical (sorted, hashable) form.
    """

    theta: float = 10000.0
    scale: float = 1.0
    rotary_dim: int = 128
    scaling: tuple | None = None

    @property
    def kind(self) -> str:
        """The ``rope_type`` of the scaling, or "default"."""
        return dict(self.scaling or ()).get("rope_type", "default")


@dataclass(frozen=True)
class KernelSpec:
    """Everything that decides the code of the kernels of one set of layers.

    Parameters
    ----------
    num_qo_heads, num_kv_heads : int
        Query heads and KV heads; the first is a multiple of the second.
    qk_head_dim, v_head_dim : int
        Width of a row of Q and K, and of V.
    dtype, kv_dtype : str
        Type of Q, K, V and O in a step, and of the pages; the latter may name a codec,
        or one for K and one for V, as in "int8,int4".
    page_size : int
        Slots of a page: a power of two from 1 to 256.
    rope : RopeSpec
        The rotation of `split_rotary`, `rope_append` and of attention with ``rotary_mode`` 1.
    target : VectorTarget or GpuTarget
        Traits of the CPU or the GPU.
    kind : {"mha", "mha_sliding", "mla", "mla_sliding"}
        "mha_sliding", "mla_sliding": rows see a window, which the kernels take as an argument.
        "mla", "mla_sliding": a slot holds one latent row, which is K, and whose first `v_head_dim`
        columns are V, for all query heads; `num_kv_heads` is 1.
    original_qk_head_dim, original_v_head_dim : int
        MLA: head dims before absorption, where every query head has K and V of its own; 0: the
        layers have absorbed attention only.
    logit_softcap : float or None
        Attention replaces a logit x by ``logit_softcap * tanh(x / logit_softcap)``.
    alibi_slopes : tuple of float, one per query head, or None
        Attention adds ``slope * (position of K - position of Q)`` to a logit, after the soft-cap.
        Not with latent rows.
    lists : bool
        Whether there is a kernel that attends to lists of positions.
    page_bounds : bool
        Whether there are kernels that bound the rows of K in pages and choose pages by this.
    spans : bool
        Whether there is a kernel for steps with spans that are attended to in both directions.
    sink_logits : bool
        Whether attention takes learned sinks, as its last argument.
    static_scales : bool
        Whether rows are quantized by scales of their heads, the last argument of what appends.
    """

    num_qo_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    dtype: str = "float32"
    kv_dtype: str = "float32"
    page_size: int = 16
    rope: RopeSpec = field(default_factory=RopeSpec)
    target: VectorTarget | GpuTarget = field(default_factory=VectorTarget)
    kind: str = "mha"
    original_qk_head_dim: int = 0
    original_v_head_dim: int = 0
    logit_softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    lists: bool = False
    page_bounds: bool = False
    spans: bool = False
    sink_logits: bool = False
    static_scales: bool = False

    @property
    def is_latent(self) -> bool:
        """Whether a slot holds one latent row: MLA, with a window or without."""
        return self.kind in ("mla", "mla_sliding")

    @property
    def non_absorbed(self) -> KernelSpec:
        """An MLA layer before absorption: multi-head attention, whose K and V are not in pages."""
        if not self.is_latent or not self.original_v_head_dim:
            return self
        return replace(
            self,
            kind="mha" if self.kind == "mla" else "mha_sliding",
            num_kv_heads=self.num_qo_heads,
            qk_head_dim=self.original_qk_head_dim,
            v_head_dim=self.original_v_head_dim,
            original_qk_head_dim=0,
            original_v_head_dim=0,
        )

    @property
    def has_two_widths(self) -> bool:
        """Whether the rows of K and of V in a page have widths of their own."""
        return not self.is_latent and self.qk_head_dim != self.v_head_dim

    @property
    def sizes(self) -> dict[str, int | tuple[int, ...]]:
        """Return the sizes in the shapes of arguments; a name may stand for several."""
        num_heads, num_kv_heads = self.num_qo_heads, self.num_kv_heads
        fused: tuple[int, ...] = (num_heads + 2 * num_kv_heads, self.qk_head_dim)
        if self.has_two_widths:
            of_k = (num_heads + num_kv_heads) * self.qk_head_dim
            fused = (of_k + num_kv_heads * self.v_head_dim,)
        return {
            "Hq": num_heads,
            "Hk": num_kv_heads,
            "Dqk": self.qk_head_dim,
            "2 Dqk": 2 * self.qk_head_dim,
            "Dv": self.v_head_dim,
            "fused": fused,
            "rotary_dim": self.rope.rotary_dim,
        }

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def codec(self) -> Codec | CodecPair | None:
        """Return the codec of the pages, if they are quantized."""
        return codec_of(self.kv_dtype)

    @property
    def k_dtype(self) -> str:
        """Type of the rows of K in the pages, or the name of their codec."""
        return self.kv_dtype if self.codec is None else self.codec.k.name

    @property
    def v_dtype(self) -> str:
        """Return what `k_dtype` is for K, of V."""
        return self.kv_dtype if self.codec is None else self.codec.v.name

    @property
    def row_dtype(self) -> str:
        """Type in which rows are read back out of pages: a quantized cache gives the step's."""
        return self.kv_dtype if self.codec is None else self.dtype


def row_copies(
    width: int, dtype: str, page_size: int, target: VectorTarget | GpuTarget
) -> KernelSpec:
    """Return the spec with which kernels copy rows of any width and meaning.

    Their pages ``[num_pages, page_size, width]`` are those of MLA. The spec has no attention.
    """
    no_rope = RopeSpec(rotary_dim=0)
    return KernelSpec(
        1, 1, width, width, dtype, dtype, page_size, no_rope, target, kind="mla"
    )  # fmt: skip


LOG2E = math.log2(math.e)
