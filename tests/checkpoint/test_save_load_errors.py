# SPDX-License-Identifier: Apache-2.0
"""Files of sequences that are damaged, lie or do not fit: refused, and nothing has changed."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import tvm

import tvm_pagedkv as pkv
from tvm_pagedkv.cache import checkpoint

from ..support.cases.caches.checkpoint_cases import Fed, call, export, forked
from ..support.emulators.python_kernels import make_cache, snapshot
from ..support.emulators.python_tree_kernels import KERNELS_WITH_TREES
from ..support.worlds.permissive_steps import permissive_step


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "x"
    forked("all").cache.save(path, history=False)
    return path.read_bytes()


class Refused:
    """A cache with a sequence, which must not change."""

    def __init__(self, path: Path):
        self.path, self.target = path, Fed("all", 2)
        self.target.add(1)
        self.target.step({1: 19})
        self.before = snapshot(self.target.cache, [1])

    def __call__(self, content: bytes, text: str | None = None) -> None:
        self.path.write_bytes(content)
        with pytest.raises(ValueError, match=text) as caught:
            self.target.cache.load(self.path)
        assert str(self.path) in str(caught.value)
        self.check()

    def check(self) -> None:
        assert snapshot(self.target.cache, [1]) == self.before
        self.target.cache.check_integrity()


def _regions(content: bytes) -> dict[str, tuple[int, int]]:
    header_end = 8 + int.from_bytes(content[:8], "little")
    regions = {"length": (0, 8), "header": (8, header_end)}
    for name, entry in json.loads(content[8:header_end]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            regions[name] = header_end + begin, header_end + end
    return regions


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("region", ["length", "header", "layer.0", "layer.1", "layer.2"])
def test_a_changed_byte(saved, region, seed, tmp_path):
    begin, end = _regions(saved)[region]
    rng, refused = np.random.default_rng(seed), Refused(tmp_path / "x")
    for at in {begin, end - 1, *rng.integers(begin, end, 40).tolist()}:
        damaged = bytearray(saved)
        damaged[at] ^= int(rng.integers(1, 256))
        refused(bytes(damaged))


@pytest.mark.parametrize("seed", range(2))
def test_a_cut_or_longer_file(saved, seed, tmp_path):
    rng, refused = np.random.default_rng(seed), Refused(tmp_path / "x")
    ends = [at for region in _regions(saved).values() for at in region]
    for length in {*ends, *(at - 1 for at in ends[1:]), *rng.integers(0, len(saved), 40).tolist()}:
        if length < len(saved):
            refused(saved[:length])
    for more in (b"\0", b" ", saved):
        refused(saved + more, "must have .* bytes by its header")
    refused(b"", "not a safetensors file")
    refused(saved[8:])


def _signed(content: bytes, change) -> bytes:
    """Another header, with its checksum right."""
    end = _regions(content)["header"][1]
    header = json.loads(content[8:end])
    change(header)
    header["__metadata__"]["header_checksum"] = "0" * 32
    blank = checkpoint._encode(header)
    header["__metadata__"]["header_checksum"] = hashlib.blake2b(blank, digest_size=16).hexdigest()
    return checkpoint._encode(header) + content[end:]


def _about(**values):
    def change(header):
        for name, value in values.items():
            header["__metadata__"][name] = value if isinstance(value, str) else json.dumps(value)

    return change


def _tables(edit):
    def change(header):
        about = header["__metadata__"]
        tables = json.loads(about["tables"])
        edit(tables)
        about["tables"] = json.dumps(tables)

    return change


LIES = {
    "format": (_about(format="pt"), "must have format"),
    "version": (_about(version="2"), "must have format"),
    "layout": (_about(layout="page_size=1"), "another layout than the cache: page_size=1"),
    "lacks": (lambda h: h["__metadata__"].pop("tables"), "malformed: 'tables'"),
    "seq_ids": (_about(seq_ids=[-1, 3, 3, 5, 6]), "must be distinct"),
    "seq_ids_float": (_about(seq_ids=[-1, 3, 4.0, 5, 6]), "list of integers"),
    "seq_ids_bool": (_about(seq_ids=[-1, 3, True, 5, 6]), "list of integers"),
    "seq_ids_wide": (_about(seq_ids=[-1, 3, 2**63, 5, 6]), "64 bits"),
    "seq_ids_few": (_about(seq_ids=[-1, 3]), "differ in length"),
    "seq_ids_type": (_about(seq_ids={"a": 1}), "list of integers"),
    "metadata_few": (_about(metadata=[]), "differ in length"),
    "metadata": (_about(metadata=["{}"] * 5), "lacks the field"),
    "not_json": (_about(tables="["), "malformed"),
    "deep": (_about(tables="[" * 10**5), "malformed"),
    "tables_none": (_about(tables=[]), "malformed"),
    "tables_type": (_about(tables=[[["a"]] * 5] * 2), "list of integers"),
    "negative": (_tables(lambda t: t[0][1].__setitem__(0, -1)), "negative"),
    "huge": (_tables(lambda t: t[0][1].__setitem__(0, 2**62)), "do not match its page tables"),
    "swapped": (_tables(lambda t: t[0][1].reverse()), "has a wrong number"),
    "short": (_tables(lambda t: t[0][1].pop()), "needs 5 pages in layer group 0, got 4"),
    "of_layer": (_about(table_of_layer=[0, 1, 9]), "no table"),
    "of_layer_few": (_about(table_of_layer=[0, 1]), "does not have 3 layers"),
    "of_layer_other": (_about(table_of_layer=[1, 0, 1]), "needs|do not match its"),
    "checksums": (_about(checksums=[1, 2]), "does not have 3 layers"),
    "checksums_type": (_about(checksums=[1, 2, 3]), "checksum is wrong"),
    "dtype": (lambda h: h["layer.0"].update(dtype="F16"), "do not match its page tables"),
    "shape": (lambda h: h["layer.0"]["shape"].append(1), "do not match its page tables"),
    "offsets": (lambda h: h["layer.1"].update(data_offsets=[0, 8]), "do not match its page tables"),
    "more": (lambda h: h.update({"layer.3": h["layer.0"]}), "do not match its page tables"),
    "about_type": (lambda h: h["__metadata__"].update(seq_ids=3), "malformed"),
}


@pytest.mark.parametrize("name", list(LIES))
def test_a_header_that_lies(saved, name, tmp_path):
    change, text = LIES[name]
    Refused(tmp_path / "x")(_signed(saved, change), text)


def test_the_untouched_file_can_be_loaded(saved, tmp_path):
    (tmp_path / "x").write_bytes(_signed(saved, lambda header: None))
    assert Refused(tmp_path / "x").target.cache.load(tmp_path / "x") == [-1, 3, 4, 5, 6]


def test_a_cache_that_cannot_take_it(saved, tmp_path):
    refused = Refused(tmp_path / "x")
    cache, path = refused.target.cache, refused.path
    path.write_bytes(saved)
    with pytest.raises(ValueError, match="sequence 1 is in the cache already"):
        cache.load(path, {3: 1})
    with pytest.raises(ValueError, match="must be distinct"):
        cache.load(path, {3: 7, 4: 7})
    with pytest.raises(ValueError, match="64 bits"):
        cache.load(path, {3: 2**63})
    with pytest.raises(TypeError):
        cache.load(path, {3: "4"})
    with pytest.raises(FileNotFoundError):
        cache.load(tmp_path / "nothing")
    refused.check()
    with permissive_step(cache, [1], [1]), pytest.raises(ValueError, match="within a step"):
        cache.load(path)
    with pytest.raises(ValueError, match="another layout"):
        Fed("all", page_size=8).cache.load(path)
    small = Fed("all", max_total_tokens=48)
    with pytest.raises(pkv.CacheFullError, match="the import needs"):
        small.cache.load(path)
    assert small.cache.is_empty and small.cache.load(path, [3]) == [3]


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    source = forked()
    path = tmp_path / "x"
    source.cache.save(path)
    content = path.read_bytes()
    with pytest.raises(KeyError, match="no sequence 77"):
        source.cache.save(path, [3, 77])
    with pytest.raises(ValueError, match="must be distinct"):
        source.cache.save(path, [3, 3])
    with pytest.raises(FileNotFoundError):
        source.cache.save(tmp_path / "nowhere" / "x")
    source.cache.begin_forward([3], [1])
    with pytest.raises(ValueError, match="within a step"):
        source.cache.save(path)
    source.cache.abort_forward()

    def full_disk(tensor):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "_bytes", full_disk)
    with pytest.raises(OSError, match="no space left"):
        source.cache.save(path)
    assert os.listdir(tmp_path) == ["x"] and path.read_bytes() == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_sequences_that_cannot_be_saved(tmp_path):
    cache = make_cache(KERNELS_WITH_TREES, sliding_window=True)
    for seq_id in range(3):
        cache.add_sequence(seq_id)
    cache.enable_sliding_window(0, 8, 2)
    for seq_ids, lengths, parents in (([0, 1], [9, 1], None), ([1], [2], [-1, -1])):
        with permissive_step(cache, seq_ids, lengths, parents):
            pass
    path = tmp_path / "x"
    for seq_ids, text in (
        (None, "sequence 0 has a sliding window"),
        ([2, 0], "sequence 0 has a sliding window"),
        ([1, 2], "sequence 1 has 2 tree nodes that are not committed"),
    ):
        with pytest.raises(ValueError, match=text):
            cache.save(path, seq_ids)
        assert not os.listdir(tmp_path)
    cache.save(path, [2])
    cache.check_integrity()


def test_an_interrupted_load_leaves_nothing(saved, tmp_path, monkeypatch):
    refused = Refused(tmp_path / "x")
    refused.path.write_bytes(saved)

    def interrupted(cache, file, layer, *rest):
        if layer == 1:
            raise KeyboardInterrupt
        return read_layer(cache, file, layer, *rest)

    read_layer = checkpoint._read_layer
    monkeypatch.setattr(checkpoint, "_read_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        refused.target.cache.load(refused.path)
    refused.check()


def test_pages_by_hand():
    """`pagedkv.export_pages` and `import_pages` check what they are given."""
    source = forked()
    export_pages = tvm.get_global_func("pagedkv.export_pages")
    import_pages = tvm.get_global_func("pagedkv.import_pages")
    out = tvm.runtime.empty((1, 2, 2, 2, 4, 8), "float32")
    for pages, slots, error, text in (
        ([0, 64], [4, 4], IndexError, "page 64"),
        ([0, -1], [4, 4], IndexError, "page -1"),
        ([0, 1], [4, 5], ValueError, "0 to 4 slots"),
        ([0, 1], [4, -1], ValueError, "0 to 4 slots"),
        ([0, 1], [4], ValueError, "2 pages and 1 numbers"),
        ([0], [4], ValueError, "shape"),
    ):
        with pytest.raises(error, match=text):
            export_pages(source.cache, 0, pages, slots, out)
    metadata, groups = export(source.cache, 3)
    target = Fed("all")
    call("prepare_import", target.cache, 3, metadata)
    too_many = tvm.runtime.empty((1, 9, *out.shape[2:]), "float32")
    with pytest.raises(ValueError, match="lacks 8 pages|lacks 6 pages|lacks 5 pages"):
        import_pages(target.cache, 3, 0, too_many)
    import_pages(target.cache, 3, 0, tvm.runtime.tensor(groups[0].numpy()[:, :2].copy()))
    with pytest.raises(ValueError, match="2 of its"):
        call("finish_import", target.cache, 3)
    import_pages(target.cache, 3, 0, tvm.runtime.tensor(groups[0].numpy()[:, 2:].copy()))
    for layer in (1, 2):
        call("import_page_group", target.cache, 3, layer, groups[layer])
    call("finish_import", target.cache, 3)
    target.rows[3] = source.rows[3]
    target.check(3)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
