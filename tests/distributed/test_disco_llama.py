# SPDX-License-Identifier: Apache-2.0
"""Llamas that several workers run together, against the same model in one piece."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import tvm_pagedkv as pkv
from tvm_pagedkv_lm import DecoderModel, ParallelModel, SamplingParams, generate
from tvm_pagedkv_lm.cli.command import main
from tvm_pagedkv_lm.parallel.parallel import resolve_stages
from tvm_pagedkv_lm.parallel.parallel_worker import ModelWorker

from ..support.harness.selections import with_slow

PAGE_SIZE, CAPACITIES = 16, (6, 320, 64)
# Shards add up in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}
SPLITS = {
    "shards": {"num_shards": 2},
    "stages": {"stages": 2},
    "both": {"num_shards": 2, "stages": [0, 1, 4], "threads": True},
}


@pytest.fixture(scope="module")
def whole() -> DecoderModel:
    return DecoderModel.from_pretrained()


@pytest.fixture(scope="module", params=with_slow(SPLITS, "stages"))
def split(request):
    """The name of a split and its model."""
    model = ParallelModel.from_pretrained(**SPLITS[request.param])
    yield request.param, model
    model.close()


@pytest.fixture
def model_of():
    """Loads models and ends their workers."""
    models = []

    def load(*args, **options) -> ParallelModel:
        models.append(ParallelModel.from_pretrained(*args, **options))
        return models[-1]

    yield load
    for model in models:
        model.close()


def _drive(model) -> list[np.ndarray]:
    """Logits of prompts, forks, pops and decode steps."""
    rng = np.random.default_rng(0)

    def tokens(*lengths: int) -> list[list[int]]:
        return [rng.integers(0, model.config.vocab_size, n).tolist() for n in lengths]

    cache, logits = model.create_cache(*CAPACITIES), []
    for seq_id in (0, 1):
        cache.add_sequence(seq_id)
    logits += [*model.prefill(cache, [0, 1], tokens(9, 20))]
    logits += [*model.decode(cache, [1, 0], [3, 4])]
    cache.fork_sequence(1, 2, 17)
    cache.pop_n(0, 4)
    logits += [*np.concatenate(model.logits(cache, [0, 2, 1], tokens(3, 12, 1)))]
    cache.remove_sequence(1)
    logits += [*model.decode(cache, [2, 0], [5, 6])]
    return logits


def test_logits_are_those_of_one_worker(whole, split):
    name, model = split
    actual, expected = _drive(model), _drive(whole)
    if name == "stages":  # the same arithmetic, in another process
        np.testing.assert_array_equal(actual, expected)
    else:
        np.testing.assert_allclose(actual, expected, **TOLERANCE)


def test_each_worker_has_its_part_alone(whole, split):
    name, model = split
    workers = model.workers()
    num_shards, threads = model.options.num_shards, SPLITS[name].get("threads", False)
    assert len({worker["process"] for worker in workers}) == (1 if threads else len(workers))
    parts = [(x["layers"], x["heads"], x["kv_heads"]) for x in workers]
    assert (
        parts
        == {
            "shards": [([0, 1, 2, 3], [0, 1, 2], [0]), ([0, 1, 2, 3], [3, 4, 5], [1])],
            "stages": [([0, 1], [*range(6)], [0, 1]), ([2, 3], [*range(6)], [0, 1])],
            "both": [
                (layers, heads, kv_heads)
                for layers in ([0], [1, 2, 3])
                for heads, kv_heads in (([0, 1, 2], [0]), ([3, 4, 5], [1]))
            ],
        }[name]
    )
    cache = model.create_cache(*CAPACITIES)
    layer_bytes = whole.create_cache(*CAPACITIES).stats()["page_pool_bytes"] // 4 // num_shards
    for worker, stats in zip(workers, cache.stats_of_workers(), strict=True):
        assert stats["page_pool_bytes"] == len(worker["layers"]) * layer_bytes


def test_text_is_that_of_one_worker(whole, split):
    _, model = split
    prompts, params = ["The with statement", "A list is"], SamplingParams(n=2, max_tokens=24)
    texts, expected = (
        [event.text for event in generate(each, prompts, params) if hasattr(event, "finish_reason")]
        for each in (model, whole)
    )
    assert texts == expected


def test_command_names_its_workers(capfd):
    arguments = ["generate", "The yield expression", "--max-tokens", "12"]
    assert main(arguments) == 0
    expected = capfd.readouterr().out
    assert main([*arguments, "--stages", "2"]) == 0
    out, err = capfd.readouterr()
    assert out == expected
    assert "layers 0-1, heads 0-5, kv heads 0-1" in err and "worker 1: process" in err
    assert main([*arguments, "--shards", "4"]) == 2
    assert "num_shards must divide num_heads (6)" in capfd.readouterr().err


@pytest.mark.slow
def test_biases_and_untied_embeddings(model_of, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    network = transformers.LlamaForCausalLM(config)
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):  # made as zeros
            torch.nn.init.normal_(parameter)
    network.save_pretrained(tmp_path)
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    expected = _drive(DecoderModel.from_pretrained(tmp_path))
    actual = _drive(model_of(tmp_path, num_shards=2, stages=2, threads=True))
    np.testing.assert_allclose(actual, expected, **TOLERANCE)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 4}, r"num_shards must divide num_heads \(6\) of the model, got 4"),
        ({"num_shards": 3}, r"num_shards must divide num_kv_heads \(2\) of the model, got 3"),
        ({"num_shards": 0}, "num_shards must be at least 1, got 0"),
        ({"stages": 5}, "stages must be between 1 and 4, the layers; got 5"),
        ({"stages": 0}, "stages must be between 1 and 4, the layers; got 0"),
        ({"stages": [0, 3, 1, 4]}, r"stages must begin with 0, rise, .* got \[0, 3, 1, 4\]"),
        ({"stages": [0, 2, 2, 4]}, r"got \[0, 2, 2, 4\]"),
        ({"stages": [1, 4]}, r"got \[1, 4\]"),
        ({"stages": [0, 2]}, r"end with the number of layers, 4; got \[0, 2\]"),
        ({"stages": [0]}, r"got \[0\]"),
        ({"stages": []}, r"got \[\]"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
    ids=str,
)
def test_models_that_cannot_be_shared_so(options, message):
    with pytest.raises(ValueError, match=message):
        ParallelModel.from_pretrained(**options)


@pytest.mark.parametrize("num_layers", [1, 5, 12])
def test_stages_are_even(num_layers):
    for stages in range(1, num_layers + 1):
        indptr = resolve_stages(stages, num_layers)
        assert resolve_stages(indptr, num_layers) == indptr
        sizes = np.diff(indptr)
        assert sizes.sum() == num_layers and sizes.max() - sizes.min() <= 1


def test_a_call_that_fails_changes_no_worker(whole, model_of):
    model = model_of(**SPLITS["stages"])
    cache = model.create_cache(2, 2 * PAGE_SIZE, 64)
    cache.add_sequence(0)
    model.prefill(cache, [0], [[*range(20)]])
    before = cache.stats_of_workers()
    for error, call in (
        (ValueError, lambda: cache.add_sequence(0)),
        (KeyError, lambda: cache.remove_sequence(9)),
        (KeyError, lambda: cache.fork_sequence(9, 1)),
        (ValueError, lambda: cache.pop_n(0, 21)),
        (ValueError, lambda: model.prefill(cache, [0], [[1] * 65])),
        (KeyError, lambda: model.decode(cache, [1], [1])),
        (pkv.CacheFullError, lambda: model.prefill(cache, [0], [[1] * 13])),
    ):
        with pytest.raises(error):
            call()
        assert cache.stats_of_workers() == before
    expected = whole.create_cache(2, 2 * PAGE_SIZE, 64)
    expected.add_sequence(0)
    whole.prefill(expected, [0], [[*range(20)]])
    np.testing.assert_array_equal(model.decode(cache, [0], [7]), whole.decode(expected, [0], [7]))


def test_a_cache_of_another_model(whole, model_of):
    model, other = (model_of(num_shards=2, threads=True) for _ in range(2))
    caches = [model.create_cache(*CAPACITIES), other.create_cache(*CAPACITIES)]
    for cache in caches:
        cache.add_sequence(0)
    calls = (
        lambda cache: model.prefill(cache, [0], [[1, 2]]),
        lambda cache: model.decode(cache, [0], [1]),
        lambda cache: model.logits(cache, [0], [[1, 2]]),
        lambda cache: [*generate(model, ["A list is"], SamplingParams(max_tokens=2), cache=cache)],
    )
    for call in calls:
        for wrong in (caches[1], whole.create_cache(*CAPACITIES)):
            with pytest.raises(ValueError, match="must be one that this model has made"):
                call(wrong)
    assert [cache.first.sequence_length(0) for cache in caches] == [0, 0]
    assert caches[1].sequence_ids() == [0]


def test_nobody_waits_for_a_worker_that_fails(model_of, monkeypatch):
    model = model_of(**SPLITS["both"])
    cache = model.create_cache(*CAPACITIES)
    cache.add_sequence(0)
    compute = ModelWorker._compute

    def fail(self, *args):
        if self.worker.rank == 1:
            raise ValueError("out of ink")
        return compute(self, *args)

    monkeypatch.setattr(ModelWorker, "_compute", fail)
    with pytest.raises(ValueError, match="out of ink"):
        model.prefill(cache, [0], [[1, 2, 3]])


def test_a_closed_model_says_so(model_of):
    model = model_of(**SPLITS["both"])
    cache = model.create_cache(*CAPACITIES)
    with model:
        cache.add_sequence(0)
    model.close()
    with pytest.raises(RuntimeError, match="the model is closed"):
        cache.add_sequence(1)


_IN_CYCLES = """
import gc, sys
from tvm_pagedkv_lm import ParallelModel

gc.disable()
for _ in range(2):
    model = ParallelModel.from_pretrained(num_shards=2, threads=sys.argv[1] == "threads")
    cycle = [model._workers.call("describe"), model._workers.session.empty((3,), "float32"), model]
    cycle.append(cycle)
    if sys.argv[2] != "never closed":
        model.close()
    del model, cycle
    if sys.argv[2] == "collected after":
        assert gc.collect() > 0
print("done")
"""


@pytest.mark.parametrize(
    "workers, when",
    [
        ("threads", "collected after"),
        pytest.param("processes", "never closed", marks=pytest.mark.slow),
        pytest.param("threads", "never closed", marks=pytest.mark.slow),
        pytest.param("processes", "never collected", marks=pytest.mark.slow),
        pytest.param("threads", "never collected", marks=pytest.mark.slow),
        pytest.param("processes", "collected after", marks=pytest.mark.slow),
    ],
)
def test_what_outlives_its_model_does_no_harm(workers, when):
    """Whether references to workers go after the model, or when Python ends."""
    done = subprocess.run(
        [sys.executable, "-c", _IN_CYCLES, workers, when],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
