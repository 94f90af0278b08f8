# SPDX-License-Identifier: Apache-2.0
"""A cache and the reference side by side, and the driver that applies random operations to both.

An operation draws its arguments, tells whether the cache must refuse them, calls the cache, and
after that brings the reference to the same state and compares. Whatever fails must leave the cache
as it was, which `World.do` sees to: the memory of all pages in use included.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tvm

import tvm_pagedkv as pkv
from tir_kernels.codec import codec_of
from tvm_pagedkv.transfer._runtime import pages_of

from ... import reference
from ...reference.window import WindowedReferenceCache
from ..emulators.python_kernels import copy_pages, make_cache, share_every_prefix, view
from ..emulators.python_tree_kernels import MLA_KERNELS_WITH_TREES, kernels_with
from ..emulators.quantized_kernels import QuantizedLayer
from .kept_positions import KeptPositions
from .random_operation import KernelFails, Operation
from .random_shapes import MLA, Shapes, is_latent, window_of
from .random_state import state_of, without_reclaiming
from .random_text import Text

CHUNK, MAX_BATCH = 12, 4  # rows of a prefill chunk; sequences of a step
MODES = {"none": 0, "normal": 1, "inline": 2}


class World(Text):
    """A small cache over NumPy kernels, and what it must hold.

    Parameters
    ----------
    rng : numpy.random.Generator
    layers : sequence
        Of each layer its window (0: none; -n: chunks of n positions), or `MLA`, which a window may
        follow.
    page_size : int
    mode : {"none", "normal", "inline"}, or one for each layer
        Rotation of the layers that are not MLA.
    aux_manager : {"merged", "plain"}
    num_pages : int
        That a sequence can have at most; with windows somewhat more.
    has_windows : bool
        Whether sequences can have a window of their own; not with MLA.
    softcap : float, optional
    slopes : of each query head, optional
        For ALiBi. Neither is for MLA layers.
    device : EmulatedDevice, optional
        None: on the CPU. On a device the host goes ahead: steps are compared when they have ended,
        and it looks at the pages now and then only.
    codec : str, optional
        By which the pages of all layers are quantized.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        layers: Sequence[int | str],
        page_size: int,
        mode: str | Sequence[str] = "none",
        aux_manager: str = "merged",
        num_pages: int = 40,
        has_windows: bool = False,
        softcap: float | None = None,
        slopes: Sequence[float] | None = None,
        device: Any = None,
        codec: str | None = None,
    ):
        self.has_windows, self.device = has_windows, device
        self.can_stop = device is None  # where the host may wait for the device
        self.last_batch: list[int] = []  # of the last step
        self.inputs: list = []  # to free them would stop it
        self.outputs: list = []  # with what they must be, to be compared when the host may wait
        self.rng, self.layers, self.page_size = rng, layers, page_size
        self.modes = [mode] * len(layers) if isinstance(mode, str) else list(mode)
        mha_modes = [m for m, layer in zip(self.modes, layers, strict=True) if not is_latent(layer)]
        self.shapes = Shapes.of(codec)
        windows = [layer for layer in layers if not is_latent(layer)]
        latent_windows = [window_of(layer) for layer in layers if is_latent(layer)]
        # With windows long sequences are of interest.
        self.max_total_tokens = num_pages * max(page_size, 4 if any(map(window_of, layers)) else 1)
        self.kept = [KeptPositions(window_of(kind), page_size) for kind in dict.fromkeys(layers)]
        self.quantized = {
            is_mla: QuantizedLayer(codec, self.shapes.layer(MLA if is_mla else 0), page_size)
            for is_mla in (False, True)
            if codec
        }
        kv_dtype = codec_of(codec) if codec else np.dtype("float32")
        self.rope = reference.Rope(rotary_dim=self.shapes.dim)
        self.mha = WindowedReferenceCache(
            len(windows), kv_dtype, self.rope, mha_modes, windows, softcap, [slopes] * len(windows)
        )
        self.mla = reference.ReferenceLatentCache(
            len(latent_windows), kv_dtype, windows=latent_windows
        )
        self.mla.v_width = self.shapes.v_dim
        self.references = [each for each in (self.mha, self.mla) if each.num_layers]
        self.importing: dict[int, Any] = {}
        self.shelf: list = []  # checkpoints
        self.peer: World | None = None  # to which rows are sent
        self.announced: list[int] = []  # blocks that are ready to be sent,
        self.blocks: dict[int, Any] = {}  # and those that wait to be released
        self.calls_left: int | None = None  # of kernels, until one fails
        self.called: set[str] = set()  # kernels
        self.has_moved = False  # rows of a commit, on a device
        self.counts: Counter[str] = Counter()  # operations, by their outcome
        self.failures: Counter[str] = Counter()  # of kernels, and within steps
        self.next_id = 0
        more = {"copy_pages": copy_pages} if self.chance(0.5) else {}
        self.cache = make_cache(
            [
                self._wrapped(self._on_pages(is_mla, {**each, **more}))
                for is_mla, each in enumerate(
                    (kernels_with(softcap, slopes), MLA_KERNELS_WITH_TREES)
                )
            ],
            layers=[self._layer(index) for index in range(len(layers))],
            max_num_sequences=MAX_BATCH,
            max_total_tokens=self.max_total_tokens,
            prefill_chunk_size=CHUNK,
            page_size=page_size,
            aux_manager=aux_manager,
            sliding_window=has_windows,
            device=device and device.device,
        )
        share_every_prefix(self.cache)

    def _layer(self, index: int) -> dict:
        layer, mode = self.layers[index], MODES[self.modes[index]]
        codec = self.quantized[is_latent(layer)].fields if self.quantized else {}
        return {**self.shapes.layer(layer), **codec, "rope_mode": mode}

    def _on_pages(self, is_mla: int, kernels: dict[str, Callable]) -> dict[str, Callable]:
        return self.quantized[bool(is_mla)].kernels(kernels) if self.quantized else kernels

    def _wrapped(self, kernels: dict[str, Callable]) -> dict[str, Callable]:
        if self.device is not None:
            kernels = self.device.kernels(kernels)

        def wrap(name: str, kernel: Callable) -> Callable:
            def call(*args):
                self.called.add(name)
                # Of a commit on a device only the first move may fail, before it is launched.
                is_move = self.device is not None and name == "compact_copy"
                if self.calls_left == 0 and not self.has_moved:
                    self.failures[f"{name} fails"] += 1
                    if self.chance(0.5) and not is_move:  # after its work
                        kernel(*args)
                    raise KernelFails(name)
                self.has_moved = self.has_moved or is_move
                if self.calls_left:
                    self.calls_left -= 1
                kernel(*args)

            return call

        # Reads change nothing, and no operation lets them fail.
        return {
            name: kernel if name.startswith("debug_get") else wrap(name, kernel)
            for name, kernel in kernels.items()
        }

    # --- what is there --------------------------------------------------------------------------

    def local(self, layer: int) -> int:
        """The layer's index in the reference of its kind."""
        is_mla = is_latent(self.layers[layer])
        return sum(is_latent(each) == is_mla for each in self.layers[:layer])

    def reference_of(self, layer: int) -> reference.ReferenceCache:
        return self.mla if is_latent(self.layers[layer]) else self.mha

    def rows(self, seq_id: int, layer: int) -> tuple[np.ndarray, ...]:
        """K and V, or the latent rows, of the text, as the pages must hold them."""
        rows = self.reference_of(layer).sequences[seq_id][self.local(layer)]
        if rows is None:
            is_mla = is_latent(self.layers[layer])
            empty = np.zeros(
                (0, self.shapes.latent_dim) if is_mla else (0, 1, self.shapes.dim), np.float32
            )
            rows = (empty,) if is_mla else (empty, empty)
        return rows

    @property
    def groups(self) -> list[int]:
        """Return the group of each layer."""
        kinds = list(dict.fromkeys(self.layers))
        return [kinds.index(layer) for layer in self.layers]

    def pages(self, layer: int) -> np.ndarray:
        """The pages of a layer: the cache's own memory, or of a device's a copy.

        Those of a codec are dequantized.
        """
        memory = pages_of(self.cache, layer)
        pages = view(memory) if self.device is None else tvm.runtime.Tensor.numpy(memory)
        return self.numbers(layer, pages)

    def numbers(self, layer: int, pages: np.ndarray) -> np.ndarray:
        """Pages of a layer with rows of float32."""
        if not self.quantized:
            return pages
        return self.quantized[is_latent(self.layers[layer])].numbers(pages)

    def put(self, array: np.ndarray) -> Any:
        """Return a layer's input as a tensor that lives until the device has read it."""
        if self.device is None:
            return array
        self.inputs.append(self.device.put(array))
        return self.inputs[-1]

    def compare(self, outputs: Any, wanted: Any, what: str) -> None:
        """Keep tensors of a finished step with their expected values."""
        self.outputs.append((outputs, wanted, what))
        if self.device is None:
            self.compare_all()

    def compare_all(self) -> None:
        for outputs, wanted, what in self.outputs:
            outputs = [out.numpy() for out in outputs]
            if len(outputs) == 2:
                reference.assert_state_close(outputs, wanted, "float32", what=what)
            else:
                reference.assert_close(outputs[0], wanted[0], "float32", what)
        self.outputs, self.inputs = [], []

    def num_reclaimed(self) -> list[int]:
        """Return how often each group has given up known content for pages."""
        return [group["num_reclaimed_pages"] for group in self.cache.stats()["groups"]]

    def tables(self) -> list[dict[int, Any]]:
        """Return the page tables of each group."""
        ids = [*self.cache.sequence_ids(), *self.importing]
        return [{i: self.cache.page_table(i, g) for i in ids} for g in range(len(self.kept))]

    def state(self) -> tuple:
        """Return everything that a failed call must leave alone."""
        return state_of(self)

    # --- drawing --------------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, items: Sequence[int] | None = None) -> int:
        items = self.ids if items is None else items
        return items[self.rng.integers(len(items))]

    def pick_some(self, ids: list[int]) -> list[int]:
        """Pick at least one, in any order."""
        size = int(self.rng.integers(1, len(ids) + 1))
        return [int(i) for i in self.rng.permutation(ids)[:size]]

    def new_id(self) -> int:
        self.next_id += int(self.rng.integers(1, 4))
        return self.next_id * (-1 if self.chance(0.2) else 1)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, dtype=np.float32)

    @contextmanager
    def failing(self, after: int | None) -> Iterator[None]:
        """Let kernels raise, all that come after so many calls of any of them; None: never."""
        self.calls_left, self.has_moved = after, False
        try:
            yield
        finally:
            self.calls_left = None

    # --- changing the reference -----------------------------------------------------------------

    def add(self, seq_id: int) -> None:
        for each in self.references:
            each.add_sequence(seq_id)
        for kept in self.kept:
            kept.begin(seq_id)

    def remove(self, seq_id: int) -> None:
        if self.importing.pop(seq_id, None) is None:
            for each in self.references:
                each.remove_sequence(seq_id)

    def shorten(self, seq_ids: Sequence[int]) -> None:
        """After pops and commits: an empty sequence may begin anew."""
        for seq_id in seq_ids:
            if self.length(seq_id) == 0:
                for kept in self.kept:
                    kept.begin(seq_id)

    def slide(self, seq_ids: Sequence[int]) -> None:
        """A step of these sequences has ended, or a commit."""
        self.mha.end_step(seq_id for seq_id in seq_ids if seq_id in self.mha.of)
        for kept, num_reclaimed in zip(self.kept, self.num_reclaimed(), strict=True):
            for seq_id in seq_ids:
                length = self.text_length(seq_id, self.committed_length(seq_id))
                kept.slide(seq_id, length, num_reclaimed)

    # --- running --------------------------------------------------------------------------------

    def do(self, operation: Operation) -> bool:
        """Draw arguments, apply, and compare; a call that fails has changed nothing.

        False where there was nothing to do it with.
        """
        args = operation.draw(self)
        name = type(operation).__name__
        if args is None:
            return False
        if self.device is not None:
            self.can_stop = self.rng.random() < 0.2
            if self.can_stop:
                self.compare_all()
        refusal, before = operation.refusal(self, args), self.state()
        may_be_gone = operation.may_be_gone(self, args)
        try:
            result = operation.apply(self, args)
        except Exception as error:
            self._check_error(operation, error, refusal, may_be_gone)
            after = self.state()
            if operation.gives_pages_back or isinstance(error, KernelFails):
                before, after = map(without_reclaiming, (before, after))
            assert after == before, f"{name} {args} failed, but has changed the cache"
            if isinstance(error, pkv.CacheFullError):
                self.make_room()
        else:
            assert refusal is None, f"{name} {args} must raise {refusal.__name__}"
            operation.check(self, args, result)
            self.counts[f"{name}: done"] += 1
        return True

    def _check_error(
        self, operation: Operation, error: Exception, refusal: type | None, may_be_gone: bool
    ) -> None:
        name = type(operation).__name__
        if isinstance(error, pkv.CacheFullError):
            assert operation.needs_pages, error
            self._check_full_group(str(error))
            self.counts[f"{name}: full"] += 1
        elif isinstance(error, KernelFails) and refusal is None:
            self.counts[f"{name}: a kernel fails"] += 1
        elif may_be_gone and "have been reclaimed" in str(error):
            assert isinstance(error, ValueError)
            self.counts[f"{name}: reclaimed"] += 1
        elif refusal is not None and isinstance(error, refusal):
            self.counts[f"{name}: refused"] += 1
        else:
            raise error

    def _check_full_group(self, message: str) -> None:
        """Layers with a window do not run out before those without, but for tree nodes.

        And where sequences have dropped what those layers still hold, blocks wait to be released,
        or a receive takes pages before it lets others go.
        """
        group = re.search(r"in layer group (\d+)", message)
        is_usual = not (self.has_windows or self.blocks or any(map(self.tree, self.ids)))
        is_usual = is_usual and "the receive" not in message
        # The pools of layers with a window are made for the sequences of one step.
        is_usual = is_usual and len(self.ids) + len(self.importing) <= MAX_BATCH
        if group and is_usual and any(kept.window == 0 for kept in self.kept):
            assert self.kept[int(group[1])].window == 0, message

    def make_room(self) -> None:
        """Remove the longest sequence; there may be none where an import is longer than all."""
        if self.ids or self.importing:
            longest = max(self.ids, key=self.length) if self.ids else self.pick([*self.importing])
            self.cache.remove_sequence(longest)
            self.remove(longest)
