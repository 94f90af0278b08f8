# SPDX-License-Identifier: Apache-2.0
"""Prompts computed in one process and continued in another give the text of a single process."""

from __future__ import annotations

import importlib.util
import multiprocessing

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tvm_pagedkv.transfer import NixlChannel, SharedMemoryChannel, TransferError
from tvm_pagedkv.transfer.nixl import use_loopback
from tvm_pagedkv_lm import DecoderModel, FinishedEvent, SamplingParams, generate
from tvm_pagedkv_lm.engine.disaggregated import RemotePrefill, serve_prefill

CHANNELS = {"shared_memory": SharedMemoryChannel, "nixl": NixlChannel}
LONG_PROMPT = "The value of the expression is an object that is bound to the name in the "
PROMPTS = ["The with statement", LONG_PROMPT, "x"]
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed"
)


def prefill_process(kind: str, address: str) -> None:
    if kind == "nixl":
        use_loopback()
    channel = CHANNELS[kind].connect(address)
    serve_prefill(DecoderModel.from_pretrained(), channel, prefill_chunk_size=20)


def run(model, params, **options):
    events = generate(model, PROMPTS, params, **options)
    finished = [event for event in events if isinstance(event, FinishedEvent)]
    return {(event.prompt, event.continuation): event.text for event in finished}


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel.from_pretrained()


@pytest.fixture
def remote(tmp_path):
    """A channel to a process that serves prompts."""
    processes = []

    def start(kind):
        if kind == "nixl":
            use_loopback()
        address = str(tmp_path / "prefill")
        process = multiprocessing.get_context("spawn").Process(
            target=prefill_process, args=(kind, address), daemon=True
        )
        process.start()
        processes.append(process)
        return CHANNELS[kind].listen(address, 120.0)

    yield start
    for process in processes:
        process.join(20.0)
        assert process.exitcode == 0


@pytest.mark.parametrize("kind", ["shared_memory", pytest.param("nixl", marks=needs_nixl)])
def test_same_text(model, remote, kind):
    params = SamplingParams(n=2, max_tokens=40, seed=3)
    texts = run(model, params, kv_transfer_channel=remote(kind))
    assert len(texts) == 6
    assert texts == run(model, params)


def test_prompts_that_the_other_end_refuses(model, remote):
    cache = model.create_cache(4, 256)
    prefill = RemotePrefill(model, cache, remote("shared_memory"))
    for seq_id in range(3):
        cache.add_sequence(seq_id)
    with pytest.raises(TransferError, match=r"999999 is not in \[0"):
        prefill.prefill([(0, [1, 2, 3]), (1, [4, 999999]), (2, [5])])
    assert [cache.sequence_length(seq_id) for seq_id in range(3)] == [0, 0, 0]
    assert cache.stats()["num_used_pages"] == 0
    cache.check_integrity()
    tokens = model.tokenizer.encode(LONG_PROMPT).ids
    (logits,) = prefill.prefill([(0, tokens)])
    local = model.create_cache(4, 256)
    local.add_sequence(0)
    (expected,) = model.prefill(local, [0], [tokens])
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    prefill.close()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
