# SPDX-License-Identifier: Apache-2.0
"""Caches with ALiBi: settings, whole steps with forks, the nn front end, and BLOOM."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

import tvm_pagedkv as pkv
from tvm_pagedkv.config import standard_slopes

from ... import reference
from ...relax.test_frontend import NUM_LAYERS, NUM_QO_HEADS, _compile, _create, check_fused
from ...support.emulators.python_kernels import poison, shuffle
from ...support.harness.selections import with_slow

HEADS, KV_HEADS, DIM = 6, 2, 16
SLOPES = (0.3, 0.0, 1.5, -0.1, 0.01, 2.0)


def make_config(**fields) -> pkv.KVCacheConfig:
    small = {
        "num_layers": 1,
        "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "qk_head_dim": DIM,
        "dtype": "float32",
        "page_size": 4,
        "max_total_tokens": 256,
        "prefill_chunk_size": 64,
        "rope": pkv.RopeConfig(mode="none"),
    }
    return pkv.KVCacheConfig(**{**small, **fields})


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 6, 8, 12, 25, 32, 71, 112])
def test_standard_slopes(num_heads):
    slopes = standard_slopes(num_heads)
    np.testing.assert_allclose(slopes, reference.alibi_slopes(num_heads), rtol=1e-12)


def test_settings():
    layers = [pkv.LayerSpec(), pkv.LayerSpec(alibi=False), pkv.LayerSpec(alibi=list(SLOPES))]
    config = make_config(num_layers=3, layers=layers, alibi=True)
    resolved = config.resolved().layers
    assert [layer.alibi for layer in resolved] == [standard_slopes(HEADS), None, SLOPES]
    assert make_config().resolved().layers[0].alibi is None
    assert hash(config) == hash(make_config(num_layers=3, layers=layers, alibi=True))
    with pytest.raises(ValueError, match="alibi needs a slope for each of 6 heads, got 2"):
        make_config(alibi=(0.5, 0.25))
    with pytest.raises(ValueError, match=r"layer.alibi must be finite"):
        make_config(layers=[pkv.LayerSpec(alibi=(float("nan"),) * HEADS)])
    with pytest.raises(TypeError, match="alibi must be True or a sequence"):
        make_config(alibi=0.5)
    with pytest.raises(ValueError, match="layer 0 is of kind 'mla', which has no ALiBi"):
        make_config(alibi=True, v_head_dim=8, layers=[pkv.LayerSpec("mla")])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, 1], ids=lambda seed: f"seed{seed}")
def test_steps_with_forks_and_windows(dtype, seed):
    """Every layer its own slopes; one with a window, whose pages begin later and later."""
    layers = [pkv.LayerSpec(), pkv.LayerSpec("mha_sliding", 6), pkv.LayerSpec(alibi=False)]
    layers.append(pkv.LayerSpec(alibi=SLOPES))
    config = make_config(num_layers=4, layers=layers, alibi=True, dtype=dtype)
    cache = pkv.create(config)
    slopes = [layer.alibi for layer in config.resolved().layers]
    windows = [layer.window for layer in layers]
    expected = reference.ReferenceCache(4, dtype, windows=windows, alibi=slopes)
    rng = np.random.default_rng(seed)

    def step(seq_ids, lengths):
        shape = (sum(lengths), HEADS + 2 * KV_HEADS, DIM)
        qkv = rng.standard_normal(shape, dtype=np.float32).astype(dtype)
        with cache.forward(seq_ids, lengths):
            for layer in range(4):
                out = cache.attention(layer, qkv).numpy()
                given = (seq_ids, lengths, qkv, KV_HEADS, DIM**-0.5)
                wanted, _ = expected.attention(layer, *given)
                reference.assert_close(out, wanted, dtype, f"layer {layer}, {lengths}")
        poison(cache)

    def both(method: str, *arguments):
        for each in (cache, expected):
            getattr(each, method)(*arguments)

    shuffle(cache, seed)
    for seq_id in (0, 1):
        both("add_sequence", seq_id)
    step([0, 1], [37, 5])
    both("fork_sequence", 0, 2)
    step([2, 0, 1], [1, 1, 1])
    both("fork_sequence", 1, 3, 3)
    both("pop_n", 0, 9)
    step([3, 0, 2], [11, 2, 5])
    both("remove_sequence", 0)
    step([1, 2, 3], [1, 1, 1])


@pytest.mark.parametrize("alibi", with_slow([True, SLOPES], SLOPES), ids=["standard", "slopes"])
def test_front_end(alibi):
    rope = {"mode": RopeMode.NONE}
    vm = _compile(pkv.PagedKVCache, rope, alibi=alibi)
    slopes = standard_slopes(NUM_QO_HEADS) if alibi is True else alibi
    check_fused(vm, _create(vm), reference.Rope(), "none", alibi=[slopes] * NUM_LAYERS)


def test_bloom():
    """Hidden states of a small random BLOOM whose attention is the cache's, in chunks and forks."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    num_heads, width = 6, 96
    model = transformers.BloomModel(
        transformers.BloomConfig(vocab_size=64, hidden_size=width, n_head=num_heads, n_layer=2)
    ).eval()
    for parameter in model.parameters():  # so that attention is far from even
        torch.nn.init.normal_(parameter, std=0.3)
    dim = width // num_heads
    cache = pkv.create(
        make_config(
            num_layers=2,
            num_qo_heads=num_heads,
            num_kv_heads=num_heads,
            qk_head_dim=dim,
            alibi=True,
        )
    )

    def forward(seq_id: int, tokens):
        x = model.word_embeddings_layernorm(model.word_embeddings(tokens))
        with cache.forward([seq_id], [len(tokens)]):
            for i, block in enumerate(model.h):
                attention = block.self_attention
                qkv = attention.query_key_value(block.input_layernorm(x))
                qkv = (
                    qkv.view(-1, num_heads, 3, dim).transpose(1, 2).reshape(-1, 3 * num_heads, dim)
                )
                out = torch.from_dlpack(cache.attention(i, qkv.contiguous()))
                x = x + attention.dense(out.reshape(-1, width))
                x = block.mlp(block.post_attention_layernorm(x), x)
        return model.ln_f(x)

    tokens, others = torch.randint(64, (2, 40))
    others[:30] = tokens[:30]
    with torch.no_grad():
        wanted = [model(x[None]).last_hidden_state[0].numpy() for x in (tokens, others)]
        cache.add_sequence(0)
        ours = [forward(0, part) for part in tokens.split([17, 1, 12, 1, 1, 8])]
        cache.fork_sequence(0, 1, 30)
        fork = [forward(1, part) for part in others[30:].split([4, 1, 5])]
    reference.assert_close(torch.cat(ours).numpy(), wanted[0], "float16", "one after another")
    reference.assert_close(torch.cat(fork).numpy(), wanted[1][30:], "float16", "from a fork")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
