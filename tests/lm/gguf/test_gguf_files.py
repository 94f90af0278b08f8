# SPDX-License-Identifier: Apache-2.0
"""GGUF files of other forms: versions, byte order, several parts, alignment, things given twice."""

from __future__ import annotations

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from tvm_pagedkv_lm.gguf.file import GgufFile  # noqa: E402
from tvm_pagedkv_lm.model.source import open_model  # noqa: E402

TENSOR = np.arange(12, dtype="float32").reshape(3, 4)


def write(path, endianess=gguf.GGUFEndian.LITTLE, alignment=None, **keys):
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in keys.items():
        writer.add_uint32(key, value)
    writer.add_tensor("first", np.ones(5, "float32"))
    writer.add_tensor("norm", TENSOR.astype("float16"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_alignment(alignment, tmp_path):
    file = GgufFile(write(tmp_path / "a.gguf", alignment=alignment))
    np.testing.assert_array_equal(file.read("norm"), TENSOR)


@pytest.mark.parametrize(
    ("version", "message"),
    [(1, "its version is 1, expected 2 or 3"), (4, "its version is 4, expected 2 or 3"), (2, None)],
)
def test_versions(version, message, tmp_path):
    path = write(tmp_path / "a.gguf")
    content = bytearray(path.read_bytes())
    content[4:8] = version.to_bytes(4, "little")
    path.write_bytes(content)
    if message is None:
        np.testing.assert_array_equal(GgufFile(path).read("norm"), TENSOR)
        return
    with pytest.raises(ValueError, match=message):
        GgufFile(path)


def test_big_endian_files_are_refused(tmp_path):
    path = write(tmp_path / "a.gguf", endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(ValueError, match="it is big-endian, expected little-endian"):
        GgufFile(path)


def renamed(path, name: bytes, other: bytes):
    """Give what has a name another one of the same length."""
    content = path.read_bytes()
    assert len(name) == len(other) and content.count(name) == 1
    path.write_bytes(content.replace(name, other))
    return path


def test_keys_and_tensors_that_are_there_twice(tmp_path):
    path = renamed(write(tmp_path / "a.gguf", key_a=7, key_b=7), b"key_b", b"key_a")
    assert GgufFile(path).metadata["key_a"] == 7
    path = renamed(write(tmp_path / "b.gguf", key_a=7, key_b=8), b"key_b", b"key_a")
    with pytest.raises(ValueError, match="it has the key key_a twice, with two values"):
        GgufFile(path)
    writer = gguf.GGUFWriter(tmp_path / "d.gguf", "llama")
    writer.add_tensor("norm_a", TENSOR)
    writer.add_tensor("norm_b", TENSOR)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="it has the tensor norm_a twice"):
        GgufFile(renamed(tmp_path / "d.gguf", b"norm_b", b"norm_a"))


def test_a_part_of_several_files_is_refused(tmp_path):
    """Whichever it is: the first one has all keys, the others have hardly any."""
    path = write(tmp_path / "model-00002-of-00003.gguf", **{"split.no": 1, "split.count": 3})
    renamed(path, b"general.architecture", b"general.xrchitecture")
    with pytest.raises(
        ValueError, match="split.count: this is one of several files; join"
    ) as caught:
        open_model(path)
    assert str(caught.value).count(str(path)) == 1


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
