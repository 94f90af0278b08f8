# SPDX-License-Identifier: Apache-2.0
"""``tvm-pagedkv kernel`` prints the kernels of a configuration in each of its forms."""

from __future__ import annotations

import json
import re

import pytest

import tir_kernels
from tir_kernels.spec import KernelSpec
from tvm_pagedkv.compiler.cuda.library import find_nvcc
from tvm_pagedkv_lm.cli import main

SMALL = {"num_layers": 1, "num_qo_heads": 4, "num_kv_heads": 2, "qk_head_dim": 16}


def _has_nvcc() -> bool:
    try:
        return bool(find_nvcc())
    except RuntimeError:
        return False


@pytest.fixture
def printed(capsys, tmp_path):
    """A function that runs the command for a small configuration and returns what it prints."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))

    def run(*arguments: str) -> str:
        assert main(["kernel", *arguments, "--config", str(config)]) == 0
        return capsys.readouterr().out

    return run


def test_names(printed):
    spec = KernelSpec(4, 2, 16, 16)
    assert printed().split() == tir_kernels.kernel_names(spec, for_stock=True)


@pytest.mark.parametrize("target", ["native", "cuda"])
def test_tvmscript(printed, target):
    text = printed("merge", "--target", target)
    assert "T.prim_func" in text
    assert "o_other: T.Buffer" in text
    assert ("T.cta_id" in text) == (target == "cuda")


LOOPS = {  # in the source and in print
    "merge": [
        r"for row in ",
        r"weights = T.alloc_buffer\(\(2, 4\)",
        r"for h in ",
        r"lse\[row, h",
        r"weights\[0, h",
        r"for h in ",
        r"own: T.float32 = weights\[0, h\]",
        r"o\[row, h, ",
    ],
    "copy_pages": [
        r"for item in ",
        r"copy: T.int32 = ",
        r"source: T.int32 = copies\[0, copy\]",
        r"destination: T.int32 = copies\[1, copy\]",
        r"length: T.int32 = copies\[2, copy\]",
        r"for offset in ",
        r"pages\[(source|destination), .*, offset, column",
    ],
}


@pytest.mark.parametrize("target", ["native", "cuda"])
@pytest.mark.parametrize("name", LOOPS)
def test_the_loop_of_the_source_is_printed(printed, name, target):
    text = printed(name, "--target", target)
    for line in LOOPS[name]:
        found = re.search(line, text)
        assert found, f"{line} is missing, or in another place"
        text = text[found.end() :]


def test_default_configuration(capsys):
    assert main(["kernel", "copy_pages"]) == 0
    assert '"num_pages", 2, 8, 16, 128' in capsys.readouterr().out


@pytest.mark.parametrize(
    "target, form, expected",
    [
        ("native", "source", "define "),
        ("native", "assembly", ".globl"),
        ("cuda", "source", "__global__"),
    ],
)
def test_source_and_assembly(printed, target, form, expected):
    assert expected in printed("copy_pages", "--target", target, "--as", form)


@pytest.mark.skipif(not _has_nvcc(), reason="needs nvcc")
def test_ptx(printed):
    assert ".target sm_80" in printed(
        "copy_pages", "--target", "cuda", "--as", "assembly", "--arch", "80"
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["unknown"], "no kernel 'unknown'"),
        (["merge", "--layer", "7"], "--layer must be from 0 to 0, got 7"),
        (["merge", "--config", "/nowhere.json"], "cannot read /nowhere.json"),
        (["merge", "--config", __file__], "test_kernel_command.py is not JSON"),
        (["merge", "--target", "no-such-cpu"], "target must be"),
    ],
    ids=["name", "layer", "config", "json", "target"],
)
def test_mistakes(capsys, arguments, message):
    assert main(["kernel", *arguments]) == 2
    assert message in capsys.readouterr().err


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
