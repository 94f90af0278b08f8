# SPDX-License-Identifier: Apache-2.0
"""GGUF files of every family against the Hugging Face directories of the same weights."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from tvm_pagedkv_lm import DecoderModel, fingerprint  # noqa: E402
from tvm_pagedkv_lm.blocks.moe import MixtureOfExperts  # noqa: E402
from tvm_pagedkv_lm.blocks.shared_kv import SharedAttention  # noqa: E402
from tvm_pagedkv_lm.config.expert_config import ExpertNames  # noqa: E402
from tvm_pagedkv_lm.config.part import AttentionPart  # noqa: E402
from tvm_pagedkv_lm.gguf.dequantize import READABLE_TYPES, dequantize  # noqa: E402
from tvm_pagedkv_lm.gguf.file import GgufFile  # noqa: E402
from tvm_pagedkv_lm.model.decoder_weights import weights  # noqa: E402
from tvm_pagedkv_lm.model.source import TINY, HuggingFaceModel, open_model  # noqa: E402

from ...support.cases.models.gguf_cases import write_gguf  # noqa: E402
from ...support.cases.models.gguf_families import CASES, SHAPE  # noqa: E402
from ...support.cases.models.model_cases import write_checkpoint  # noqa: E402


@pytest.mark.parametrize("case", CASES)
def test_same_configuration_and_weights_as_hugging_face(case, tmp_path):
    model_type, fields, keys, tensors = CASES[case]
    write_checkpoint(tmp_path, model_type, SHAPE | fields)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", keys=keys, tensors=tensors)
    theirs, ours = HuggingFaceModel(tmp_path), open_model(file)
    expected, found = theirs.config(), ours.config()
    assert _rounded(_without_names(found)) == _rounded(_without_names(expected))
    checkpoint, own = theirs.tensors(), ours.tensors()
    layers, names = range(expected.num_layers), set()
    pairs = zip(weights(found, layers), weights(expected, layers), strict=True)
    for (name, weight), (same_name, same_weight) in pairs:
        assert name == same_name
        for part, same in zip(weight.parts, same_weight.parts, strict=True):
            names.add(part.name)
            values = part.of(own.read(part.name, part.shape, part.expert))
            expected_values = same.of(checkpoint.read(same.name, same.shape, same.expert))
            # Norms of Gemma are stored with one added, which rounds.
            atol = 1e-6 if model_type.startswith("gemma") and "norm" in part.name else 0
            np.testing.assert_allclose(
                values, expected_values.astype("float32"), rtol=0, atol=atol, err_msg=part.name
            )
    assert names == set(own.names())


def _without_names(config):
    """A configuration without the names of its experts' tensors, which are others in GGUF files."""

    def change(part):
        if not isinstance(part, MixtureOfExperts):
            return part
        return replace(part, experts=replace(part.experts, names=ExpertNames()))

    return config.map(change)


def _rounded(config):
    """A configuration whose numbers are float32, as GGUF stores them."""

    def narrow(value):
        if isinstance(value, float):
            return float(np.float32(value))
        if isinstance(value, tuple):
            return tuple(narrow(each) for each in value)
        return value

    def change(part):
        if isinstance(part, SharedAttention):
            return replace(part, attention=change(part.attention))
        if not isinstance(part, AttentionPart):
            return part
        rope = part.spec.rope
        rope = replace(rope, theta=narrow(rope.theta), scaling=narrow(rope.scaling))
        scale = part.scale and round(part.scale, 6)
        return replace(part, spec=replace(part.spec, rope=rope), scale=scale)

    return replace(config.map(change), norm_eps=narrow(config.norm_eps))


@pytest.mark.parametrize("name", READABLE_TYPES)
def test_every_type_of_tensor(name, tmp_path):
    """Random blocks: the file's reader finds the right bytes, and the package knows the numbers."""
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    print("seed 0")
    num_blocks = 2 if block > 1 else 64
    rows = random.integers(0, 60, (3, num_blocks * size), dtype="u1")  # scales are finite
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("before", np.ones(5, "float32"))
    if name in ("F32", "F16"):  # the writer knows them by the dtype of the array
        writer.add_tensor("t", rows.view({"F32": "float32", "F16": "float16"}[name]))
    else:
        writer.add_tensor("t", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "t.gguf")
    values = file.read("t")
    assert values.shape == (3, num_blocks * block) and values.dtype == np.float32
    reader = {t.name: t for t in gguf.GGUFReader(tmp_path / "t.gguf").tensors}["t"]
    np.testing.assert_array_equal(values, gguf.dequantize(reader.data, reader.tensor_type))
    assert np.isfinite(values).all() and len(np.unique(values)) > 8


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16"])
def test_quantized_values_are_near(name):
    """What the package dequantizes is what was quantized, to half a step of the codes."""
    values = np.random.default_rng(1).uniform(-1, 1, (4, 64)).astype("float32")
    kind = gguf.GGMLQuantizationType[name]
    found = dequantize(gguf.quants.quantize(values, kind).view("u1"), kind)
    step = {"Q8_0": 1 / 127, "Q4_0": 1 / 8, "Q4_1": 2 / 15, "Q5_0": 1 / 16, "Q5_1": 2 / 31}
    assert np.abs(found - values).max() <= step.get(name, 2**-7) * 1.01


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder, "llama", SHAPE | {"hidden_size": 64, "intermediate_size": 96})
    return folder


def test_logits_of_quantized_weights(directory, tmp_path):
    """A whole model, against a Hugging Face directory of the dequantized weights."""
    from safetensors.numpy import save_file

    kind = gguf.GGMLQuantizationType.Q4_1
    file = write_gguf(directory, tmp_path / "model.gguf", quantization=kind)
    source = open_model(file)
    config = source.config()
    assert config.dtype == "float16"
    parts = {p for _, w in weights(config, range(config.num_layers)) for p in w.parts}
    values = {part.name: source.tensors().read(part.name, part.shape) for part in parts}
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(directory / name, tmp_path)
    save_file({n: np.ascontiguousarray(v) for n, v in values.items()}, tmp_path / "m.safetensors")
    tokens, logits = [3, 77, 5, 290, 18], []
    for each in (file, tmp_path):
        model = DecoderModel.from_pretrained(each, "float32", weights="float")
        cache = model.create_cache(1, 64)
        cache.add_sequence(0)
        logits.append(model.prefill(cache, [0], [tokens]))
    np.testing.assert_array_equal(*logits)


def test_folder_with_a_file_and_its_sampling(directory, tmp_path):
    keys = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.chat_template": "{{ eos_token }}",
    }
    file = write_gguf(directory, tmp_path / "a.gguf", keys=keys)
    source = open_model(tmp_path)
    assert source.path == file and source.fingerprint() == fingerprint(file) != fingerprint(TINY)
    assert source.sampling() == {"temperature": 0.5, "top_k": 20}
    assert source.config().eos_token_ids == (2, 7)
    assert source.chat_template().render([]) == source.tokenizer().id_to_token(2)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "eos_token_id": [9]}')
    source = open_model(tmp_path)
    assert source.sampling() == {"temperature": 0.2, "top_k": 20}
    assert source.config().eos_token_ids == (2, 7, 9)
    shutil.copy(file, tmp_path / "b.gguf")
    with pytest.raises(ValueError, match="has several GGUF files; name one of a.gguf, b.gguf"):
        open_model(tmp_path)


@pytest.fixture(scope="module")
def quantized_latent(tmp_path_factory):
    """A model whose projections of K are transposed in the file; its directory and the file."""
    folder = tmp_path_factory.mktemp("latent")
    model_type, fields, keys, _ = CASES["deepseek v3"]
    wide = {
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "q_lora_rank": 32,
        "moe_intermediate_size": 32,
    }
    write_checkpoint(folder, model_type, SHAPE | fields | wide | {"intermediate_size": 96})
    kind = gguf.GGMLQuantizationType.Q8_0
    return folder, write_gguf(folder, folder / "model.gguf", keys=keys, quantization=kind)


def test_quantized_projections_of_latent_rows(quantized_latent):
    folder, file = quantized_latent
    tensors, name = open_model(file).tensors(), "model.layers.1.self_attn.kv_b_proj.weight"
    found = tensors.read(name, (4 * (32 + 32), 32))
    expected = HuggingFaceModel(folder).tensors().read(name, found.shape)
    assert 0 < np.abs(found - expected).max() < 0.01 * np.abs(expected).max()
    assert tensors.format(name) == "Q8_0"


@pytest.mark.slow
def test_models_with_quantized_projections_of_latent_rows(quantized_latent):
    """The codes of those of K are of other groups than the model's, so they are not kept."""
    _, file = quantized_latent
    tokens, logits = [3, 77, 5, 290, 18], []
    for weights_as in ("float", "auto"):
        model = DecoderModel.from_pretrained(file, "float32", weights=weights_as)
        assert bool(model.options.formats) == (weights_as == "auto")
        cache = model.create_cache(1, 64)
        cache.add_sequence(0)
        logits.append(model.prefill(cache, [0], [tokens]))
    assert (logits[0] - logits[1]).std() < 0.02 * logits[0].std()


@pytest.mark.parametrize("case", ["deepseek v2", "deepseek v3"])
def test_files_that_leave_out_how_experts_are_chosen(case, tmp_path):
    """As those of GLM-4.7-Flash: a correction of scores is there with sigmoids alone."""
    model_type, fields, keys, _ = CASES[case]
    write_checkpoint(tmp_path, model_type, SHAPE | fields)
    without = (".expert_gating_func",)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", keys=keys, without=without)
    found, expected = open_model(file).config(), HuggingFaceModel(tmp_path).config()
    assert _rounded(_without_names(found)) == _rounded(_without_names(expected))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "MXFP4"])
def test_codes_of_experts_are_kept(name, tmp_path):
    """Each expert's codes stand for the numbers that llama.cpp's package reads."""
    gguf = pytest.importorskip("gguf")
    model_type, fields, keys, tensors = CASES["gpt-oss"]
    write_checkpoint(tmp_path, model_type, SHAPE | fields)
    kind = gguf.GGMLQuantizationType[name]
    file = tmp_path / "model.gguf"
    write_gguf(tmp_path, file, keys=keys, tensors=tensors, quantization=kind)
    source = open_model(file)
    experts = source.config().find(MixtureOfExperts).experts
    read = source.tensors()
    for projection, shape in (("gate_proj", (64, 64)), ("down_proj", (64, 64))):
        theirs = f"model.layers.1.mlp.experts.{projection}"
        stored = GgufFile(file).read_bytes(f"blk.1.ffn_{projection[:-5]}_exps.weight")
        for expert in range(experts.num_experts):
            assert experts.names.tensor(expert, projection) == theirs[len("model.layers.1.mlp.") :]
            rows = read.read_quantized(theirs, shape, (expert, experts.num_experts))
            expected = gguf.quants.dequantize(stored[expert], kind)
            np.testing.assert_array_equal(rows.values(), expected)
            floats = read.read(theirs, shape, (expert, experts.num_experts))
            np.testing.assert_array_equal(floats, expected)


# --- what is refused ----------------------------------------------------------------------------


def test_experts_of_other_architectures_are_refused(tmp_path):
    write_checkpoint(tmp_path, "qwen2", SHAPE)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", keys={".expert_count": 8})
    with pytest.raises(ValueError, match="qwen2.expert_count: this architecture"):
        open_model(file)


SPECIAL = [
    ("gemma 4", {".attention.head_count_kv": [2, 2]}, {}, "needs head_count_kv and feed_forward"),
    (
        "gemma 4",
        {".attention.key_length_swa": 8},
        {},
        "gemma4.attention.value_length_swa must be 8",
    ),
    ("gemma 4", {}, {"rope_freqs.weight": np.ones(16, "f4") * 3}, "are not those of Gemma 4"),
    ("gemma 3n", {".feed_forward_length": [80.5, 80.5]}, {}, "must be integers"),
    ("qwen2", {".feed_forward_length": [80, 90]}, {}, "must be the same for all layers"),
    (
        "deepseek v3",
        {".expert_gating_func": 3},
        {},
        "deepseek2.expert_gating_func must be 1, got 3",
    ),
]


@pytest.mark.parametrize(("case", "keys", "tensors", "message"), SPECIAL)
def test_files_that_cannot_be(case, keys, tensors, message, tmp_path):
    model_type, fields, own, _ = CASES[case]
    write_checkpoint(tmp_path, model_type, SHAPE | fields)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", keys=own | keys, tensors=tensors)
    with pytest.raises(ValueError, match=message) as caught:
        open_model(file)
    assert str(caught.value).count(str(file)) == 1


@pytest.mark.parametrize("key", [".block_count", "tokenizer.ggml.tokens", ".context_length"])
def test_missing_keys_are_named(directory, key, tmp_path):
    file = write_gguf(directory, tmp_path / "model.gguf", without=(key,))
    with pytest.raises(ValueError, match=f"lacks the key .*{key}"):
        DecoderModel.from_pretrained(file)


def test_unknown_architectures_and_tensors_are_named(directory, tmp_path):
    ones = np.ones((1, 300), "float32")
    file = write_gguf(directory, tmp_path / "a.gguf", tensors={"blk.0.ssm_a.weight": ones})
    with pytest.raises(ValueError, match="has the tensor blk.0.ssm_a.weight, which models of arch"):
        open_model(file)
    file = write_gguf(directory, tmp_path / "b.gguf", tensors={"rope_freqs.weight": ones[0, :8]})
    assert open_model(file).config().cache_layers[0].rope.scaling_dict["factor"] == 1.0
    file = write_gguf(
        directory, tmp_path / "c.gguf", tensors={"rope_freqs.weight": ones[0, :8] * 3}
    )
    with pytest.raises(ValueError, match="tensor rope_freqs.weight are not those of Llama 3"):
        open_model(file)
    writer = gguf.GGUFWriter(tmp_path / "d.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="general.architecture 'mamba' is not supported; expected"):
        open_model(tmp_path / "d.gguf")


def test_types_that_are_not_read_are_named(directory, tmp_path):
    kind = gguf.GGMLQuantizationType.TQ2_0
    rows = np.zeros((300, gguf.GGML_QUANT_SIZES[kind][1]), "u1")
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="tensor t has type TQ2_0; expected one of F32, F16"):
        GgufFile(tmp_path / "t.gguf").read("t")


def test_damaged_files(directory, tmp_path):
    """A file cut anywhere, or with any wrong byte of its header, raises a ValueError or loads."""
    whole = write_gguf(directory, tmp_path / "model.gguf").read_bytes()
    file = tmp_path / "damaged.gguf"
    for length in (0, 3, 4, 7, 20, 60, 500, 4000):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged.gguf"):
            open_model(file)
    file.write_bytes(whole[:-1000])
    with pytest.raises(ValueError, match="is cut off within tensor"):
        DecoderModel.from_pretrained(file)
    random = np.random.default_rng(2)
    print("seed 2")
    refused = 0
    for position in random.integers(4, 3000, 200):
        damaged = bytearray(whole)
        damaged[position] ^= int(random.integers(1, 256))
        file.write_bytes(damaged)
        try:
            source = open_model(file)
            source.tokenizer()
        except ValueError:
            refused += 1
    assert refused > 20


def test_files_of_other_kinds(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="expected a Hugging Face directory, or a .gguf file"):
        open_model(tmp_path / "weights.bin")
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        DecoderModel.from_pretrained(tmp_path / "none.gguf")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
