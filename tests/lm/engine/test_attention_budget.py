# SPDX-License-Identifier: Apache-2.0
"""`generate --attention-budget`: the text of whole attention where the budget holds all of it."""

from __future__ import annotations

import pytest

from tvm_pagedkv_lm.cli import main

TEXT = ["generate", "--model", "tiny", "--temperature", "0", "--max-tokens", "24", "def read(self"]


def test_text(capfd):
    texts = []
    for budget in ((), ("--attention-budget", "512"), ("--attention-budget", "32")):
        assert main([*TEXT, *budget]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("def read(self")
    assert texts[2].startswith("def read(self") and texts[2] != texts[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["64", "--sliding-window", "32"], "cannot be combined with --sliding-window"),
        (["64", "--stages", "2"], "cannot be combined with --shards and --stages"),
        (["64", "--speculative"], "num_speculative_tokens must be 0 with an attention budget"),
        (["16"], "attention_budget must be at least 32 positions, two pages; got 16"),
    ],
    ids=str,
)
def test_what_is_refused(options, message, capfd):
    assert main([*TEXT, "--attention-budget", *options]) != 0
    assert message in capfd.readouterr().err


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
