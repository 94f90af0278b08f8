# SPDX-License-Identifier: Apache-2.0
"""A bfloat16 model on a CPU with AMX: attention and linear layers on the model of the tiles."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.target import Target

from tvm_pagedkv.compiler import cpu_classes
from tvm_pagedkv_lm import DecoderModel
from tvm_pagedkv_lm.kernels.linear.packed import packed_matrix
from tvm_pagedkv_lm.model.decoder_weights import weights

from ...support.emulators import tile_model
from ...support.harness.selections import with_slow

pytestmark = pytest.mark.skipif(not tile_model.runs_here(), reason="no AVX-512 with bfloat16")
# The name keeps what is compiled here apart from code for the CPU without tiles.
TARGET = Target({**tile_model.CPU.export(), "model": "tile-model"})
TOKENS = np.random.default_rng(0).integers(0, 256, 60)


@pytest.fixture
def amx(monkeypatch):
    """Compile for a CPU that has AMX, and execute tile instructions on the model."""
    traits = cpu_classes._traits

    def with_tiles(features: frozenset[str]) -> dict:
        return traits(features) | {"has_amx": "avx512bf16" in features}

    monkeypatch.setattr(cpu_classes, "_traits", with_tiles)
    with tile_model.tile_model():
        yield


def _logits(model: DecoderModel) -> np.ndarray:
    """Logits of a prompt in chunks of 37 and 20 tokens, and of three decode steps."""
    cache = model.create_cache(1, 128)
    cache.add_sequence(0)
    chunks = np.split(TOKENS, [37, 57, 58, 59])
    return np.concatenate([model.logits(cache, [0], [chunk])[0] for chunk in chunks])


def _linear_dots(model: DecoderModel, num_tiles: int) -> int:
    """Products of tiles that the linear layers take for some tiles of 16 rows."""
    total = 0
    for name, weight in weights(model.config, model.options.layers_of(model.config)):
        if weight.is_matrix and name != "embed_tokens":  # rows of which are looked up
            shapes = [part.shape for part in weight.parts]
            rows = sum(shape[0] for shape in shapes)
            matrix = packed_matrix(name, rows, shapes[0][1], model.options)
            total += num_tiles * matrix.num_blocks * 4 * -(-matrix.in_features // 32)
    return total


@pytest.mark.parametrize("kept", with_slow(["float", "int8"], "int8"))
def test_logits(amx, kept):
    """All linear layers are multiplied in tiles, and logits are off by what bfloat16 costs."""
    model = DecoderModel.from_pretrained(None, "bfloat16", target=TARGET, weights=kept)
    found = _logits(model)
    assert tile_model.counts().dots > _linear_dots(model, 3 + 2) > 0
    expected = _logits(DecoderModel.from_pretrained(None, "float32", weights=kept))
    size = np.abs(expected).max()
    assert np.abs(found - expected).max() < 0.05 * size


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
