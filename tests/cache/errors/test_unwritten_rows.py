# SPDX-License-Identifier: Apache-2.0
"""A step publishes only what every layer wrote, whoever began and ended it.

Rows that a layer left out stay in their sequence, as in the stock cache. They are not found by
their tokens, not stored, sent or saved, and neither is what was computed from them.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm_ffi import Shape

from tvm_pagedkv.transfer import _runtime

from ...support.cases.caches.cache_cases import DIM, HEADS, NUM_KV_HEADS, NUM_QO_HEADS
from ...support.cases.caches.mla_cache_cases import make_mla_cache
from ...support.emulators.dict_store import DictStore
from ...support.emulators.python_kernels import KERNELS, LAYER, MLA_KERNELS, MLA_LAYER, make_cache
from ...support.emulators.python_tree_kernels import KERNELS_WITH_TREES
from ...support.worlds.permissive_steps import permissive_step
from ..layers.test_layer_kinds import INDPTR, KINDS, Model, make_stage
from ..prefixes.test_prefix_tiers import TieredTexts

PROMPT = list(range(30))
LATENT = MLA_LAYER["qk_head_dim"]


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, HEADS, DIM)).astype("float32")


def in_parts(cache, layer: int, count: int) -> None:
    q, k, v = np.split(rows(count), [NUM_QO_HEADS, NUM_QO_HEADS + NUM_KV_HEADS], axis=1)
    cache.self_attention(layer, q, k, v)


def past_alone(cache, layer: int, count: int) -> None:
    cache.cross_attention(layer, rows(count)[:, :NUM_QO_HEADS])


def fused(cache, layer: int, count: int) -> None:
    cache.attention(layer, rows(count))


def borrowed(cache, layer: int, count: int) -> None:
    q, k, v = np.split(rows(count), [NUM_QO_HEADS, NUM_QO_HEADS + NUM_KV_HEADS], axis=1)
    cache.attention_with_shared_kv(0, q, k, v)


def latent(cache, layer: int, count: int) -> None:
    cache.append_mla_kv(layer, np.zeros((count, LATENT), "float32"))


def latent_past_alone(cache, layer: int, count: int) -> None:
    cache.cross_attention(layer, np.zeros((count, 4, LATENT), "float32"))


def nothing(cache, layer: int, count: int) -> None:
    pass


def step(cache, tokens: list[int], *layers, seq_id: int = 0) -> None:
    """A step as the virtual machine makes it; `layers` says what each layer of the model does."""
    call = tvm_ffi.get_global_func
    ids, lengths = Shape([seq_id]), Shape([len(tokens)])
    call("vm.builtin.kv_state_begin_forward")(cache, ids, lengths)
    call("pagedkv.prefix_record_step")(cache, Shape(tokens))
    for layer, attend in enumerate(layers):
        attend(cache, layer, len(tokens))
    call("vm.builtin.kv_state_end_forward")(cache)
    cache.check_integrity()


MHA, SLIDING = LAYER, {**LAYER, "kind": "mha_sliding", "window": 3}
LINEAR = {"kind": "linear"}


def cache_of(*layers: dict):
    if all(layer is MLA_LAYER for layer in layers):
        return make_mla_cache(layers=list(layers))
    if MLA_LAYER in layers:
        layers = tuple({**x, "kernel_set": 1} if x is MLA_LAYER else x for x in layers)
        return make_cache([KERNELS, MLA_KERNELS], layers=list(layers))
    return make_cache(layers=list(layers))


@pytest.mark.parametrize(
    ("layers", "whole", "partial"),
    [
        ((MHA, MHA), (fused, fused), (nothing, nothing)),
        ((MHA, MHA), (fused, in_parts), (fused, nothing)),
        ((MHA, MHA), (in_parts, fused), (nothing, fused)),
        ((MHA, MHA), (in_parts, in_parts), (in_parts, past_alone)),
        ((MHA, SLIDING), (fused, fused), (fused, nothing)),
        ((SLIDING, SLIDING), (fused, fused), (nothing, fused)),
        ((MHA, LINEAR), (fused, nothing), (nothing, nothing)),
        ((MHA,), (fused, borrowed), (nothing,)),
        ((MHA, MHA), (fused, fused), (fused, borrowed)),
        ((MLA_LAYER, MLA_LAYER), (latent, latent), (latent, latent_past_alone)),
        ((MHA, MLA_LAYER), (fused, latent), (fused, nothing)),
    ],
    ids=lambda value: "-".join(
        each["kind"] if isinstance(each, dict) else each.__name__ for each in value
    ),
)
def test_only_what_every_layer_wrote_is_found(layers, whole, partial):
    cache = cache_of(*layers)
    cache.add_sequence(0)
    step(cache, PROMPT[:6], *whole)
    assert cache.match_prefix(PROMPT) == 4
    step(cache, PROMPT[6:13], *partial)
    assert cache.sequence_length(0) == 13  # as in the stock cache
    assert cache.match_prefix(PROMPT) == 4 and cache.num_recorded_tokens(0) == 6
    with pytest.raises(ValueError, match="left out the row at position 6"):
        cache.record_tokens(0, PROMPT[6:13])
    cache.fork_sequence(0, 1, 9)
    cache.fork_sequence(0, 2, 6)
    with pytest.raises(ValueError, match="left out the row at position 6"):
        cache.record_tokens(1, PROMPT[6:9])
    cache.pop_n(0, 7)
    step(cache, PROMPT[6:13], *whole)  # written again
    step(cache, PROMPT[6:13], *whole, seq_id=2)  # never left out
    assert cache.match_prefix(PROMPT) == 12
    for seq_id in range(3):
        cache.remove_sequence(seq_id)
    assert cache.match_prefix(PROMPT) == 13


@pytest.mark.parametrize("write", ["through", "back", "selective"])
def test_a_store_never_gets_such_rows(write):
    values: dict[bytes, bytes] = {}
    one = TieredTexts(tiers={"store": DictStore(values), "model_id": "m", "write_policy": write})
    one.cache.add_sequence(0)
    step(one.cache, PROMPT[:6], fused, fused)
    step(one.cache, PROMPT[6:], fused)
    one.cache.add_sequence(1, PROMPT)  # a hit, which is when "selective" saves a page
    one.cache.remove_sequence(1)
    one.cache.remove_sequence(0)
    one.fill(50)  # reclaims all pages
    assert one.cache.flush_prefixes(60)
    two = TieredTexts(tiers={"store": DictStore(values), "model_id": "m", "lookup_timeout": 60.0})
    assert two.cache.add_sequence(0, PROMPT) == 4
    assert one.cache.close_prefixes(60) and two.cache.close_prefixes(60)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_answer_for_their_own_layers(stage):
    """One that has no layers has nothing to leave out."""
    cache = make_stage(stage)
    kinds = KINDS[INDPTR[stage] : INDPTR[stage + 1]]
    model = Model(cache, kinds, INDPTR[stage])
    model.change("add_sequence", 0)
    model.step([0], [5])
    cache.record_tokens(0, PROMPT[:5])
    with permissive_step(cache, [0], [3]):
        pass
    if not kinds:
        return cache.record_tokens(0, PROMPT[5:8])
    with pytest.raises(ValueError, match="left out the row at position 5"):
        cache.record_tokens(0, PROMPT[5:8])


def test_what_is_saved(tmp_path):
    cache = make_cache()
    for seq_id in (0, 1):
        cache.add_sequence(seq_id)
    step(cache, PROMPT[:6], fused, fused)
    step(cache, PROMPT[:6], fused, fused, seq_id=1)
    step(cache, PROMPT[6:9], fused)
    text = r"sequence 0 cannot be saved: .* left out the row at position 6; pop .* to length 6"
    with pytest.raises(ValueError, match=text):
        cache.save(tmp_path / "all")
    with pytest.raises(ValueError, match=text):
        tvm_ffi.get_global_func("vm.builtin.attention_kv_cache_get_checkpoint_metadata")(cache, 0)
    assert not list(tmp_path.iterdir()) and cache.sequence_length(0) == 9
    cache.save(tmp_path / "one", [1])
    cache.pop_n(0, 3)
    cache.save(tmp_path / "all")


def test_what_is_sent():
    cache = make_cache()
    blocks: list[int] = []
    _runtime.set_send_handler(cache, 1, blocks.append, [64])
    cache.add_sequence(0)
    step(cache, PROMPT[:6], fused, fused)
    _runtime.mark_send(cache, 0, 0, [1, 0, 12], 1)
    step(cache, PROMPT[6:8], fused)
    cache.add_sequence(1)
    with cache.forward([0, 1], [2, 2]):  # computed from rows that are missing
        for layer in range(2):
            cache.attention(layer, rows(4))
    assert len(blocks) == 1 and _runtime.send_block(cache, blocks[0])["end"] == 6
    cache.fork_sequence(0, 2)
    with pytest.raises(ValueError, match=r"sequence 2 cannot be sent: .* at position 6"):
        _runtime.mark_send(cache, 2, 0, [1, 16, 12], 1)
    _runtime.mark_send(cache, 2, 0, [1, 16, 6], 1)
    assert len(blocks) == 2
    cache.pop_n(0, 4)  # the send goes on
    step(cache, PROMPT[6:13], fused, fused)
    block = _runtime.send_block(cache, blocks[2])
    assert len(blocks) == 3 and (block["begin"], block["end"]) == (6, 12)
    cache.check_integrity()


def test_a_tree_of_which_some_nodes_were_left_out():
    cache = make_cache(KERNELS_WITH_TREES)
    for leaf, is_whole in ((2, True), (3, False)):
        cache.add_sequence(leaf)
        with permissive_step(cache, [leaf], [3], [-1, 0, 0]):
            for layer in range(2):
                cache.attention(layer, rows(3))
        with permissive_step(cache, [leaf], [1], [0]):
            cache.attention(0, rows(1))
        cache.commit_tree([leaf], [leaf])
        if is_whole:
            cache.record_tokens(leaf, PROMPT[:2])
            continue
        cache.record_tokens(leaf, PROMPT[:1])
        with pytest.raises(ValueError, match="left out the row at position 1"):
            cache.record_tokens(leaf, PROMPT[1:2])


def test_rows_that_debug_set_kv_writes():
    """It writes every layer, so a sequence that it has filled is whole."""
    cache = make_cache()
    cache.add_sequence(0)
    step(cache, PROMPT[:6])
    k, v = np.random.default_rng(0).standard_normal((2, 2, 6, NUM_KV_HEADS, DIM)).astype("float32")
    cache.debug_set_kv(0, 1, k[:, 1:], v[:, 1:])
    with pytest.raises(ValueError, match="left out the row at position 0"):
        cache.record_tokens(0, PROMPT[:6])
    cache.debug_set_kv(0, 0, k, v)
    cache.record_tokens(0, PROMPT[:6])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
