# SPDX-License-Identifier: Apache-2.0
"""Sequences with recurrent layers from one cache to another: they continue bit for bit."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tvm_ffi

from tvm_pagedkv.transfer import Receiver, Sender, SharedMemoryChannel, TransferError, _runtime
from tvm_pagedkv.transfer.layout import num_slots_of

from ..support.cases.caches.transfer_cases import connect, mark_send, pump, state
from ..support.worlds.recurrent_world import Text, World, outputs

OPTIONS = {"checkpoint_tokens": 16, "history_tokens": 32}


def worlds(seed: int = 4, dtype: str = "bfloat16", **options) -> tuple[World, World]:
    pair = tuple(World(seed, dtype, **(OPTIONS | options)) for _ in range(2))
    tvm_ffi.get_global_func("pagedkv.shuffle_free_pages")(pair[1].cache, seed)
    return pair


def state_tables(world: World) -> list[list[int]]:
    function = tvm_ffi.get_global_func("pagedkv.state_table")
    return [list(function(world.cache, 0, group)) for group in range(3)]


def feed(world: World, seq_id: int, lengths, salt: int = 0) -> None:
    for n in lengths:
        outputs(world, {seq_id: n}, salt + world.cache.sequence_length(seq_id))


def same_future(source: World, target: World, seq_id: int, length: int) -> None:
    """Forks, pops and steps give the same bits in both caches."""
    for each in (source, target):
        each.cache.check_integrity()
        each.cache.fork_sequence(seq_id, 50, max(length - 16, 0))
        each.cache.fork_sequence(seq_id, 51, length - 1)
        each.cache.fork_sequence(seq_id, 52)
        each.cache.pop_n(52, min(9, length))
    for salt, lengths in enumerate(({seq_id: 1, 50: 1, 51: 5, 52: 1}, {50: 17, 52: 6})):
        ours, theirs = (outputs(each, lengths, salt) for each in (source, target))
        for one, other in zip(ours, theirs, strict=True):
            assert np.array_equal(one, other), (length, lengths)
    for each in (source, target):
        for i in (50, 51, 52):
            each.cache.remove_sequence(i)
        each.cache.check_integrity()


@pytest.mark.parametrize(
    ("length", "states"),
    [*((n, "float32") for n in (1, 15, 16, 17, 31, 32, 33, 64, 67)), (67, "bfloat16")],
)
def test_a_prompt_arrives_as_it_is_computed(length, states):
    source, target = worlds(state_dtype=states)
    sender, receiver = connect(source.cache, target.cache)
    source.cache.add_sequence(7)
    target.cache.add_sequence(7)
    ticket = receiver.request(7, length)
    send = sender.send(sender.next_request(), 7)
    while (done := source.cache.sequence_length(7)) < length:
        feed(source, 7, [min(13, length - done)])
        pump(sender, receiver)
    sender.finish(send)
    receiver.wait(ticket)
    sender.wait(send)
    for each in (source, target):
        assert each.cache.stats()["num_pinned_pages"] == 0
    same_future(source, target, 7, length)


def test_states_of_another_type_are_refused():
    """Before anything is sent."""
    source, target = worlds()[0], World(4, "bfloat16", **OPTIONS, state_dtype="bfloat16")
    with pytest.raises(ValueError, match="state_dtype"):
        connect(source.cache, target.cache)


@pytest.mark.parametrize(
    ("begin", "end"), [(5, 9), (30, 47), (30, 49), (33, 80), (40, 65), (48, 64)]
)
def test_the_rest_of_a_text_that_both_have_begun(begin, end):
    """Where the receiver's own states are late enough, none is sent."""
    source, target = worlds()
    sender, receiver = connect(source.cache, target.cache)
    for each in (source, target):
        each.cache.add_sequence(0)
        feed(each, 0, [begin])
    feed(source, 0, [end - begin])
    held = [group["num_used_pages"] for group in target.cache.stats()["state_groups"]]
    ticket = receiver.request(0, end - begin)
    taken = [group["num_used_pages"] for group in target.cache.stats()["state_groups"]]
    wants_state = (end - 16) // 16 * 16 > begin
    assert [b - a for a, b in zip(held, taken, strict=True)] == [int(wants_state)] * 3
    send = sender.send(sender.next_request(), 0)
    sender.finish(send)
    pump(sender, receiver)
    assert ticket.is_done
    same_future(source, target, 0, end)


@pytest.mark.parametrize("begin", [0, 5, 16, 45])
def test_a_cancelled_transfer_leaves_the_states(begin):
    source, target = worlds()
    sender, receiver = connect(source.cache, target.cache)
    for each in (source, target):
        each.cache.add_sequence(0)
        if begin:
            feed(each, 0, [begin])
    before = state(target.cache)
    tables = state_tables(target)
    ticket = receiver.request(0, 60)
    send = sender.send(sender.next_request(), 0)
    feed(source, 0, [35])
    assert send.handed_over == begin + 35
    pump(sender, receiver)
    target.cache.check_integrity()
    receiver.cancel(ticket)
    with pytest.raises(TransferError):
        sender.wait(send) if send.is_finished else sender.finish(send)
    assert state(target.cache) == before
    assert state_tables(target) == tables
    target.cache.check_integrity()
    assert source.cache.stats()["num_pinned_pages"] == 0
    if begin:
        source.cache.pop_n(0, 35)
        same_future(source, target, 0, begin)


def test_what_cannot_be_sent_is_refused():
    source, target = worlds()
    sender, receiver = connect(source.cache, target.cache)
    for each in (source, target):
        each.cache.add_sequence(0)
    feed(source, 0, [40, 48])
    receiver.request(0, 88)
    request = sender.next_request()
    slots = tuple(request.slots)
    for wrong, message in (
        (slots[:-3], "has no page for states of group 2"),
        ((*slots, 0), "1 numbers after"),
        ((*slots[:-3], 2, 0, 0), "should have 2 states"),
        ((*slots[:-2], 10**6, 64), "is not in"),
        ((*slots[:-1], 32), "asks for the state behind 32 positions"),
        ((*slots[:-3], 0), "asks for the state behind 0 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            mark_send(source.cache, tvm_ffi.Shape(wrong))
    feed(source, 0, [40])  # the request is for the first 88 positions
    with pytest.raises(ValueError, match="position 64 of sequence 0 is gone: recurrent layers"):
        mark_send(source.cache, tvm_ffi.Shape(slots))
    assert source.cache.stats()["num_send_blocks"] == 0
    with pytest.raises(ValueError, match="the receiver has 9 groups of layers, this cache 10"):
        _runtime.set_send_handler(source.cache, 5, print, num_slots_of(target.cache)[:-1])
    source.cache.check_integrity()


def test_layouts_are_compared():
    source, target = (World(1, "float32", checkpoint_tokens=n) for n in (8, 16))
    with pytest.raises(ValueError, match="the layouts of the two caches differ"):
        connect(source.cache, target.cache)


def test_states_are_in_shared_memory(tmp_path):
    path = tmp_path / "socket"
    source, target = worlds(enable_kv_transfer=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        ends: dict[str, SharedMemoryChannel] = {}
        listen = threading.Thread(
            target=lambda: ends.update(source=SharedMemoryChannel.listen(str(path)))
        )
        listen.start()
        while not path.exists():
            pass
        ends["target"] = SharedMemoryChannel.connect(str(path))
        listen.join()
    with Sender(source.cache, ends["source"]) as sender:
        with Receiver(target.cache, ends["target"]) as receiver:
            source.cache.add_sequence(0)
            target.cache.add_sequence(0)
            ticket = receiver.request(0, 50)
            send = sender.send(sender.next_request(), 0)
            feed(source, 0, [20, 30])
            sender.finish(send)
            while not (ticket.is_done and send.is_done):
                receiver.poll()
                sender.poll()
            same_future(source, target, 0, 50)


@pytest.mark.parametrize("seed", [pytest.param(21, marks=pytest.mark.slow), 22])
def test_random_sequences_move(seed):
    """Between random operations in two caches, sequences move from one to the other."""
    print(f"seed {seed}")
    rng, pair = np.random.default_rng(seed), worlds(seed, checkpoint_tokens=8)
    pair[1].rng = np.random.default_rng(seed + 100)
    num_moved = 0
    for _ in range(60):
        for world in pair:
            for _ in range(8):
                world.do()
        source, target = pair if rng.integers(2) else pair[::-1]
        ids = [i for i, text in source.texts.items() if not text.nodes and text.tokens]
        if not ids or len(target.texts) == 7:
            continue
        seq_id, new_id = int(rng.choice(ids)), min(set(range(7)) - set(target.texts))
        tokens = source.texts[seq_id].tokens
        sender, receiver = connect(source.cache, target.cache)
        begin = target.cache.add_sequence(new_id, tokens)
        target.texts[new_id] = Text(tokens[:begin])
        try:
            if begin < len(tokens):
                ticket = receiver.request(new_id, len(tokens) - begin)
                send = sender.send(sender.next_request(), seq_id)
                sender.finish(send)
                pump(sender, receiver)
                assert ticket.is_done
                target.texts[new_id] = Text(list(tokens))
                target.cache.record_tokens(new_id, tokens[begin:])
                num_moved += 1
        except ValueError as error:  # a state that a pop has dropped, or rows that are gone
            assert "is gone" in str(error)
        except RuntimeError as error:
            assert "pages, but" in str(error), error
        finally:
            receiver.close()
            sender.close()
        for world in pair:
            world.cache.check_integrity()
    print(num_moved, pair[0].counts, pair[1].counts)
    assert num_moved > 10


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
