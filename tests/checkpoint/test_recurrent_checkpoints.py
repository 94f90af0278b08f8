# SPDX-License-Identifier: Apache-2.0
"""Sequences with recurrent layers and short convolutions to a file and back, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tvm_ffi

import tvm_pagedkv as pkv

from ..support.cases.caches.checkpoint_cases import call, export, restore
from ..support.harness.selections import with_slow
from ..support.worlds.recurrent_world import Text, World, outputs

POPPABLE = 16


def saved(world: World, path, seed: int, **options) -> World:
    """Save all sequences without token trees, and load them in a cache of another world."""
    other = World(seed, world.config.dtype, **options)
    tvm_ffi.get_global_func("pagedkv.shuffle_free_pages")(other.cache, seed + 1)
    for seq_id, text in world.texts.items():
        if text.nodes:
            with pytest.raises(ValueError, match="not committed"):
                world.cache.save(path, [seq_id])
    ids = [i for i, text in world.texts.items() if not text.nodes]
    world.cache.save(path, ids)
    assert other.cache.load(path) == ids
    other.cache.check_integrity()
    other.texts = {i: Text(list(world.texts[i].tokens)) for i in ids}
    return other


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_random_sequences_come_back_and_go_on(dtype, tmp_path):
    """Every 50 operations, everything moves to another cache through a file."""
    seed = 11
    print(f"seed {seed}")
    options = {"checkpoint_tokens": 8}
    world, moved = World(seed, dtype, **options), 0
    for turn in range(6):
        for _ in range(50):
            world.do()
        other = saved(world, tmp_path / "x", seed, **options)
        again = tmp_path / "y"
        other.cache.save(again)
        if all(not text.nodes for text in world.texts.values()):
            world.cache.save(tmp_path / "x")
            assert again.read_bytes() == (tmp_path / "x").read_bytes()
        moved += len(other.texts)
        other.rng, other.counts, other.old = np.random.default_rng(turn), {}, []
        world = other
    assert moved > 12


@pytest.mark.parametrize("states", with_slow(["float32", "bfloat16", "float16"], "float16"))
def test_a_loaded_sequence_has_the_bits_of_the_original(tmp_path, states):
    """Also behind forks and pops as far back as any sequence can pop."""
    options = {"checkpoint_tokens": 16, "history_tokens": 16, "state_dtype": states}
    world = World(4, "bfloat16", **options)
    for seq_id, lengths in ((0, (43, 1, 1)), (2, (16, 1)), (3, (5,)), (5, ())):
        world.cache.add_sequence(seq_id)
        world.texts[seq_id] = Text()
        for n in lengths:
            outputs(world, {seq_id: n}, n)
            world.texts[seq_id].tokens += [0] * n
    world.cache.fork_sequence(0, 1, 37)  # between two states, and shares pages
    world.texts[1] = Text([0] * 37)
    world.cache.pop_n(2, 3)  # before the first state
    other = saved(world, tmp_path / "x", 4, **options)
    used = [[g["num_used_pages"] for g in w.cache.stats()["state_groups"]] for w in (world, other)]
    assert used[0] == used[1]
    for each in (world, other):
        each.cache.fork_sequence(0, 7, 45 - POPPABLE)
        each.cache.fork_sequence(1, 8, 30)  # a fork keeps what its next row needs
        each.cache.pop_n(0, 9)
    steps = {0: 1, 1: 1, 7: 1, 8: 1}, {2: 7}, {3: 1, 5: 20}, {8: 30, 0: 9}
    for salt, lengths in enumerate(steps):
        for ours, theirs in zip(
            outputs(world, lengths, salt), outputs(other, lengths, salt), strict=True
        ):
            assert np.array_equal(ours, theirs), lengths
    other.cache.check_integrity()


def grown(length: int, **options) -> World:
    """A sequence 0 of some tokens, in steps."""
    world = World(4, "bfloat16", checkpoint_tokens=8, **options)
    world.cache.add_sequence(0)
    for begin in range(0, length, 17):
        outputs(world, {0: min(17, length - begin)}, begin)
    world.texts[0] = Text([0] * length)
    return world


@pytest.mark.parametrize("position", [0, 3, 8, 21, 40])
def test_pops_after_a_load_reach_as_far_as_before(tmp_path, position):
    world = grown(61)
    other = saved(world, tmp_path / "x", 4, checkpoint_tokens=8)
    for each in (world, other):
        each.cache.fork_sequence(0, 1, position)
        each.cache.pop_n(0, 61 - position)
        each.cache.check_integrity()
    for lengths in ({0: 1, 1: 5}, {1: 1, 0: 9}):
        for ours, theirs in zip(
            outputs(world, lengths, 1), outputs(other, lengths, 1), strict=True
        ):
            assert np.array_equal(ours, theirs)


def test_a_file_without_history_is_smaller_and_pops_16_positions(tmp_path):
    world, other = grown(61), World(4, "bfloat16", checkpoint_tokens=8)
    world.cache.save(tmp_path / "all", [0])
    world.cache.save(tmp_path / "few", [0], history=False)
    sizes = [(tmp_path / name).stat().st_size for name in ("all", "few")]
    assert sizes[1] < 0.7 * sizes[0]
    assert other.cache.load(tmp_path / "few") == [0]
    with pytest.raises(ValueError, match="cannot pop sequence 0 .* did not come with .* a file"):
        other.cache.pop_n(0, 40)
    for each in (world, other):
        each.cache.pop_n(0, POPPABLE)
    for ours, theirs in zip(outputs(world, {0: 3}, 1), outputs(other, {0: 3}, 1), strict=True):
        assert np.array_equal(ours, theirs)
    with pytest.raises(TypeError, match="history must be a bool"):
        world.cache.save(tmp_path / "few", [0], history=1)


def test_history_that_does_not_fit_is_left_out(tmp_path):
    """A cache with fewer pages for ingredients takes the last ones."""
    world = grown(61)
    world.cache.save(tmp_path / "x", [0])
    small = World(4, "bfloat16", checkpoint_tokens=8, history_tokens=8)
    small.config = replace(small.config, max_num_sequences=1, prefill_chunk_size=16)
    small.cache = pkv.create(small.config)
    assert small.cache.load(tmp_path / "x") == [0]
    small.cache.check_integrity()
    with pytest.raises(ValueError, match="cannot pop sequence 0"):
        small.cache.pop_n(0, 60)
    for each in (world, small):
        each.cache.pop_n(0, 24)
    for ours, theirs in zip(outputs(world, {0: 3}, 1), outputs(small, {0: 3}, 1), strict=True):
        assert np.array_equal(ours, theirs)


def test_states_of_another_type_are_refused(tmp_path):
    """Neither way; the cache stays as it was."""
    caches = [grown(20, state_dtype=dtype).cache for dtype in ("float32", "bfloat16", "float16")]
    for i, cache in enumerate(caches):
        cache.save(tmp_path / str(i), [0])
    for i, cache in enumerate(caches):
        cache.load(tmp_path / str(i), seq_ids={0: 1})
        for j in {0, 1, 2} - {i}:
            with pytest.raises(ValueError, match="another layout than the cache"):
                cache.load(tmp_path / str(j), seq_ids={0: 2})
            with pytest.raises(ValueError, match="another layout than the cache"):
                cache.load(tmp_path / str(j), seq_ids={0: 2}, convert=True)
        assert len(cache) == 2
        cache.check_integrity()


def test_page_groups_of_states_by_hand():
    """What engines call: a page group for each layer, then those of states."""
    world, other = (World(1, "float32", checkpoint_tokens=8) for _ in range(2))
    world.cache.add_sequence(0)
    outputs(world, {0: 29}, 0)
    checkpoint = export(world.cache, 0)
    groups = json.loads(checkpoint[0])["groups"]
    assert [group["group_index"] for group in groups] == list(range(11))
    assert [group["layer_begin"] for group in groups[8:]] == [
        layer["page_group"] for layer in world.cache.description["recurrent_layers"]
    ]
    for group in groups[8:]:
        assert (group["state_length"], group["first_position"]) == (29, 0)
        assert group["dtype"] == "float32"
    assert groups[8]["shape"] == [1, 4, 4, 16, 24]
    restore(other.cache, 3, checkpoint, order=[10, 3, 1, 9, 0, 2, 8, 4, 6, 5, 7])
    for ours, theirs in zip(outputs(world, {0: 5}, 1), outputs(other, {3: 5}, 1), strict=True):
        assert np.array_equal(ours, theirs)
    call("prepare_import", other.cache, 4, checkpoint[0])
    with pytest.raises(IndexError, match="one for the states of each recurrent layer"):
        call("import_page_group", other.cache, 4, 11, checkpoint[1][0])


def edited(text: str, group: int, **fields) -> str:
    about = json.loads(text)
    about["groups"][group] |= fields
    return json.dumps(about)


def test_wrong_metadata_changes_nothing():
    world, other = (World(1, "float32", checkpoint_tokens=8) for _ in range(2))
    world.cache.add_sequence(0)
    outputs(world, {0: 29}, 0)
    text, tensors = export(world.cache, 0)
    recurrent = world.cache.description["recurrent_layers"][0]["page_group"]
    shape = json.loads(text)["groups"][8]["shape"]
    page_bytes = 4 * 4 * 16 * 24

    def states(count: int, first: int, length: int) -> dict:
        return {
            "num_logical_pages": count, "first_position": first, "state_length": length,
            "shape": [1, count, *shape[2:]], "nbytes": count * page_bytes,
        }  # fmt: skip

    for group, fields, message in (
        (8, {"state_length": 30}, "state_length of group 8 must be between 0 and 29, got 30"),
        (8, {"state_length": -1}, "state_length of group 8"),
        (8, {"state_length": 22}, "num_logical_pages of group 8 must be 3, got 4"),
        (recurrent, {"state_length": 8}, "must be between 0 and 0"),
        (8, {"dtype": "float16"}, "shape or dtype of group 8"),
        (8, {"first_position": 4}, "must be that of a page within the 29 positions"),
        (8, states(1, 24, 29), "must keep a state"),  # the full one before it is missing
        (8, states(1, 0, 7), "must keep the ingredients"),  # they begin behind it
        (8, states(0, 0, 0), "must keep the ingredients"),
    ):
        with pytest.raises(ValueError, match=message):
            call("prepare_import", other.cache, 3, edited(text, group, **fields))
    about = json.loads(text)
    del about["groups"][-1]
    with pytest.raises(ValueError, match="each of the 8 layers and of the 3 with states, got 10"):
        call("prepare_import", other.cache, 3, json.dumps(about))
    assert other.cache.sequence_ids() == []
    assert other.cache.stats()["num_importing_sequences"] == 0
    call("prepare_import", other.cache, 3, text)
    with pytest.raises(ValueError, match="data must have shape"):
        call("import_page_group", other.cache, 3, 8, tensors[9])
    with pytest.raises(ValueError, match="lacks page group 0"):
        call("finish_import", other.cache, 3)
    other.cache.remove_sequence(3)
    other.cache.check_integrity()


def test_layouts_tell_recurrent_layers_apart(tmp_path):
    world = World(1, "float32", checkpoint_tokens=8)
    world.cache.add_sequence(0)
    world.cache.save(tmp_path / "x")
    other = World(1, "float32", checkpoint_tokens=16)
    with pytest.raises(ValueError, match=r"another layout.*checkpoint_tokens=8"):
        other.cache.load(tmp_path / "x")
    with pytest.raises(ValueError, match="another layout"):
        World(1, "bfloat16", checkpoint_tokens=8).cache.load(tmp_path / "x")


def test_k_and_v_beside_states_can_be_converted(tmp_path):
    """Rows of recurrent layers and states stay as they are."""
    world = World(1, "float32", checkpoint_tokens=8)
    world.cache.add_sequence(0)
    outputs(world, {0: 29}, 0)
    world.cache.save(tmp_path / "x")
    other = pkv.create(replace(world.config, kv_dtype="float32"))
    assert other.load(tmp_path / "x", convert=True) == [0]
    layer = world.layers[1]
    for each in (world.cache, other):
        each.begin_forward([0], [3])
    for ours, theirs in zip(
        layer.run(world.cache, 1, [4, 5, 6]), layer.run(other, 1, [4, 5, 6]), strict=True
    ):
        assert np.array_equal(ours.numpy(), theirs.numpy())


def test_an_import_that_does_not_fit_changes_nothing(tmp_path):
    world = World(1, "float32", checkpoint_tokens=8)
    for seq_id in range(4):
        world.cache.add_sequence(seq_id)
        outputs(world, {seq_id: 40}, seq_id)
    world.cache.save(tmp_path / "x")
    small = pkv.create(replace(world.config, max_total_tokens=128, max_num_sequences=1))
    with pytest.raises(pkv.CacheFullError, match="the import needs"):
        small.load(tmp_path / "x")
    assert small.sequence_ids() == []
    assert small.load(tmp_path / "x", [2]) == [2]
    small.check_integrity()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
