# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with an encoder of pictures: their text models, against transformers.

transformers writes the tensors under the names of the published files.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tvm_pagedkv_lm import DecoderModel  # noqa: E402
from tvm_pagedkv_lm.families.registry import config_from_fields  # noqa: E402

from ...support.cases.models.model_cases import (  # noqa: E402
    PAGE_SIZE,
    VOCAB_SIZE,
    assert_close,
    random_tokens,
    write_tokenizer,
)
from ...support.harness.selections import all_slow_but  # noqa: E402

TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
PICTURES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA3 = {
    "sliding_window": 7,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LLAMA4 = {"intermediate_size_mlp": 96, "num_local_experts": 4, "attention_chunk_size": 8}
MINISTRAL3 = {
    "model_type": "ministral3",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.5,
    },
}
# Name of the classes, and of a text model -> fields of the text model, of the encoder, and of the
# whole.
CASES = {
    "Gemma3": (GEMMA3, {"model_type": "siglip_vision_model"}, {"mm_tokens_per_image": 4}),
    "Mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral", "head_dim": 8}, {}),
    "Mistral3 Ministral3": (MINISTRAL3, {"model_type": "pixtral", "head_dim": 8}, {}),
    "Llama4": (
        LLAMA4,
        dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16),
        {},
    ),
}


def write_model(name: str, folder, **fields):
    """Write a random model with an encoder; return it."""
    text, pictures, whole = CASES[name]
    name, *_ = name.split()
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | text, vision_config=PICTURES | pictures, **whole | fields
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", all_slow_but(CASES, "Gemma3"))
def test_logits(name, tied, tmp_path):
    theirs = write_model(name, tmp_path, tie_word_embeddings=tied)
    assert any(".language_model." in f".{x}" for x in theirs.state_dict())
    model = DecoderModel.from_pretrained(tmp_path, "float32", page_size=PAGE_SIZE)
    matrices = theirs.get_input_embeddings(), theirs.get_output_embeddings()
    is_tied = matrices[0].weight is matrices[1].weight
    assert model.config.tied_embeddings == is_tied and is_tied <= tied
    (tokens,) = random_tokens(0, 30)
    cache = model.create_cache(1, 64, 64)
    cache.add_sequence(0)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)])).logits[0].numpy()
    chunks = np.split(tokens, [5, 18])
    found = np.concatenate([model.logits(cache, [0], [chunk])[0] for chunk in chunks])
    assert_close(found, expected)


def test_files_leave_out_what_is_the_default():
    """The text model of Gemma 3 4B as it is published."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
        "torch_dtype": "bfloat16",
    }
    config = config_from_fields(whole)
    theirs = transformers.Gemma3Config(**json.loads(json.dumps(whole))).text_config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.head_dim,
    )
    assert (config.vocab_size, config.context_length) == (262208, 131072)
    assert config.tied_embeddings and config.eos_token_ids == (1, 106)
    windows = [layer.window for layer in config.cache_layers]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    assert kinds == theirs.layer_types and set(windows) == {None, 1024}
    factors = [dict(layer.rope.scaling or {}).get("factor") for layer in config.cache_layers]
    assert factors == [8.0 if window is None else None for window in windows]


def test_text_models_of_other_kinds_are_refused():
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": TEXT | {"model_type": "ministral"},
    }
    with pytest.raises(ValueError, match="model_type 'ministral' is not .*ministral3 or mistral4"):
        config_from_fields(whole)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
