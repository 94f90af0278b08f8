# SPDX-License-Identifier: Apache-2.0
"""Prompts of a hybrid computed at one end and continued at another give the text of one process."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tvm_pagedkv.transfer import SharedMemoryChannel
from tvm_pagedkv_lm import DecoderModel, FinishedEvent, SamplingParams, generate
from tvm_pagedkv_lm.engine.disaggregated import serve_prefill

from ...support.cases.models.model_cases import PAGE_SIZE, random_tokens, write_checkpoint
from ...support.harness.selections import few_of

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
FAMILIES = {
    "qwen3_5_text": {
        "intermediate_size": 80,
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    },
    "falcon_h1": {
        "intermediate_size": 80,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_d_ssm": 128,
    },
    "lfm2": {
        "intermediate_size": 80,
        "layer_types": ["conv", "full_attention"],
        "block_multiple_of": 16,
    },
}


def texts_of(model, prompts, **options):
    params = SamplingParams(n=2, max_tokens=12, seed=3)
    events = generate(model, prompts, params, **options)
    finished = [event for event in events if isinstance(event, FinishedEvent)]
    return {(event.prompt, event.continuation): event.tokens for event in finished}


@pytest.mark.parametrize("family", few_of(FAMILIES, 1))
def test_same_text(family, tmp_path):
    """Prompts longer and shorter than a chunk, a page and the positions that can be popped."""
    write_checkpoint(tmp_path, family, FAMILIES[family] | HEADS)
    model = DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE)
    prompts = [tokens.tolist() for tokens in random_tokens(11, 1, 15, 43, 20, 97)]
    expected = texts_of(model, prompts)
    (tmp_path / "own").mkdir(mode=0o700)
    path, served = str(tmp_path / "own" / "prefill"), []
    with SharedMemoryChannel.listener(path) as listener:
        server = threading.Thread(
            target=lambda: served.append(
                serve_prefill(model, listener.accept(60.0), prefill_chunk_size=20)
            )
        )
        server.start()
        channel = SharedMemoryChannel.connect(path)
        texts = texts_of(model, prompts, kv_transfer_channel=channel)
        server.join(60.0)
    assert texts == expected
    assert served == [len(prompts)]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
