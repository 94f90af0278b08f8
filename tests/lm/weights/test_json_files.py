# SPDX-License-Identifier: Apache-2.0
"""JSON files of models: what editors and frameworks write is read, the rest is told apart."""

from __future__ import annotations

import json
import math

import pytest

from tvm_pagedkv_lm.config.json_files import read_json


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_objects_as_editors_write_them(encoding, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"a": ["\u00e9"]}, indent=1, ensure_ascii=False), encoding)
    assert read_json(file) == {"a": ["\u00e9"]}
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert read_json(file) == {"a": ["\u00e9"]}


def test_numbers_that_json_does_not_have(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"limit": [0.0, Infinity], "x": NaN, "y": 1, "y": 1}')
    fields = read_json(file)
    assert fields["limit"] == [0.0, math.inf] and math.isnan(fields["x"]) and fields["y"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}".encode("utf-16"), "is in UTF-16 or UTF-32; JSON files must be UTF-8"),
        ("{}".encode("utf-16-le"), "is in UTF-16 or UTF-32"),
        ("{}".encode("utf-32"), "is in UTF-16 or UTF-32"),
        (b'{"a": "\xe9"}', "is not JSON: 'utf-8' codec"),
        (b"", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"3", "holds a int; expected a JSON object"),
        (b'{"a": {"b": 1, "b": 2}}', "has b twice: 1 and 2"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer to a file in Git LFS"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_files_that_are_refused(content, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_json(file)
    assert str(caught.value).startswith(str(file))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
