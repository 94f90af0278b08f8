# SPDX-License-Identifier: Apache-2.0
"""The command ``tvm-pagedkv chat``: driven by stdin and, once, by a pseudo-terminal."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tvm_pagedkv_lm.cli.command import main

from ..engine.test_conversation import TEMPLATE
from ..text.test_models_chat import directory_with

GREEDY = ["--temperature", "0", "--max-tokens", "16"]


@pytest.fixture
def chat(monkeypatch, capfd):
    """Run the command on lines of input; return its answers, its notes and its exit status."""

    def run(lines: list[str], *arguments: str) -> tuple[str, str, int]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main(["chat", *GREEDY, *arguments])
        return *capfd.readouterr(), status

    return run


def test_answers_to_stdout_and_notes_to_stderr(chat):
    out, notes, status = chat(
        ["The with statement", "", "/stats", "A list is", "/stats", "/exit", "x"]
    )
    assert status == 0
    assert re.search(r"last answer: first token after \d+ ms, \d+ tokens/s", notes)
    assert re.search(r"reused 3\d of 4\d prompt tokens; first token after \d+ ms", notes)
    assert "/help lists commands" in notes and "cache: " in notes
    assert "reused" not in out and "\x1b" not in out + notes
    first, *_ = chat(["The with statement"])
    assert first.strip() and out.startswith(first.rstrip("\n")) and len(out) > len(first)


def test_commands(chat, tmp_path):
    file = str(tmp_path / "chat.json")
    lines = ["/help", "The with statement", "A list is", f"/save {file}", "/trim", "/trim",
             "/trim", "/reset", f"/load {file}", "/stats", "/save", "/load", "/nothing",
             "/load nowhere.json", "/save /no/such/folder/x"]  # fmt: skip
    out, notes, status = chat(lines)
    assert status == 0
    for text in ("Ctrl-C stops an answer", f"wrote {file}", "the oldest turn is dropped; ",
                 "there are no turns", "all turns are forgotten", f"{file}: 2 turns, ",
                 "/save needs a file", "/load needs a file",
                 "no command /nothing; /help lists them", "cannot read nowhere.json: No such file",
                 "cannot write /no/such/folder/x: No such file"):  # fmt: skip
        assert notes.count(text) == 1 or text == "the oldest turn is dropped; ", text
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [each["content"] for each in messages[::2]] == ["The with statement", "A list is"]


def test_a_session_goes_on_as_if_it_had_not_ended(chat, tmp_path):
    lines = ["The with statement", "A list is", "x"]
    whole, *_ = chat(lines)
    files = ["--session", str(tmp_path / "chat.json"), "--checkpoint", str(tmp_path / "pages")]
    parts = []
    for line in lines:
        out, notes, status = chat([line, "/stats"], *files)
        assert status == 0 and "not used" not in notes
        parts.append(out)
    assert "".join(parts) == whole
    assert f"{files[1]}: 2 turns" in notes and re.search(r"reused 60 of 63 prompt", notes)
    # Without its pages, the session is computed anew.
    (tmp_path / "pages").write_bytes(b"x")
    out, notes, status = chat(["/stats"], *files)
    assert status == 0 and notes.count(f"{files[3]} is not used: ") == 1
    assert "computes the conversation anew" in notes


def test_prefixes_of_an_earlier_chat_are_found_in_a_folder(chat, tmp_path):
    lines = ["The with statement is an object that is bound to a name", "A list is", "/stats"]
    plain, notes, _ = chat(lines)
    _, in_pool, prompt = counts_of(notes)
    assert "from" not in notes and in_pool >= prompt - 12  # the message and what ends a page
    folder = str(tmp_path / "pages")
    for num_chats in range(2):
        out, notes, status = chat(
            [lines[0], "/stats", *lines[1:]], "--prompt-cache", folder, "--max-tokens", "16"
        )
        assert status == 0 and out == plain and "in time" not in notes
        first, second = (line for line in notes.splitlines() if "last answer: " in line)
        if num_chats == 0:
            assert "reused" not in first and "store" not in second
            continue
        tiers, reused, prompt = counts_of(first)
        assert reused == (prompt - 1) // 16 * 16 > 0 and tiers == {"store": reused}
        # The first turn is in the pool, and the folder has the page that the second one fills.
        tiers, reused, prompt = counts_of(second)
        assert tiers.keys() == {"pool", "store"} and sum(tiers.values()) == reused
        assert in_pool < reused == (prompt - 1) // 16 * 16
    # Other weights, here another type of them, have no pages there.
    _, notes, status = chat([lines[0], "/stats"], "--prompt-cache", folder, "--dtype", "bfloat16")
    assert status == 0 and "last answer: first token" in notes


def test_a_folder_and_a_session_go_together(chat, tmp_path):
    """The pages of a checkpoint are found first, those of the folder where there is none."""
    lines = ["The with statement", "A list is", "x"]
    whole, *_ = chat(lines)
    files = ["--session", str(tmp_path / "chat.json"), "--prompt-cache", str(tmp_path / "pages")]
    checkpoint = ["--checkpoint", str(tmp_path / "checkpoint")]
    parts = []
    for line, more in zip(lines, (checkpoint, checkpoint, []), strict=True):
        out, notes, status = chat([line, "/stats"], *files, *more)
        assert status == 0 and "not used" not in notes
        parts.append(out)
    assert "".join(parts) == whole
    tiers, reused, _ = counts_of(notes)
    assert tiers == {"store": reused} and reused % 16 == 0 and reused >= 32


def counts_of(notes: str) -> tuple[dict[str, int], int, int]:
    """Of the last answer: tokens by tier, tokens that were reused, and those of the prompt."""
    found = re.findall(r"reused (\d+) of (\d+) prompt tokens(?: \((.*?)\))?; ", notes)
    reused, prompt, tiers = found[-1]
    by_tier = re.findall(r"(\d+) from (\w+)", tiers)
    return {tier: int(count) for count, tier in by_tier}, int(reused), int(prompt)


def test_a_model_with_a_template(chat, tmp_path):
    folder = str(directory_with(tmp_path, TEMPLATE))
    session = str(tmp_path / "chat.json")
    files = ["--model", folder, "--session", session]
    assert chat(["The with statement"], *files, "--system", "One")[2] == 0
    assert json.loads((tmp_path / "chat.json").read_text())["system"] == "One"
    assert chat(["x"], *files)[2] == 0
    assert json.loads((tmp_path / "chat.json").read_text())["system"] == "One"
    assert chat(["x"], *files, "--system", "Two")[2] == 0
    fields = json.loads((tmp_path / "chat.json").read_text())
    assert fields["system"] == "Two" and len(fields["messages"]) == 6


def test_a_full_context(chat):
    out, notes, status = chat(["x" * 40, "y" * 40, "z", "/reset", "z"], "--max-total-tokens", "80")
    assert status == 0 and out.count("\n") >= 2
    assert "the conversation with this message has 98 tokens, and at most 79 leave room" in notes
    assert "/trim drops the oldest turn, /reset all" in notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "x"], "--checkpoint needs --session"),
        (["--model", "no/such/folder"], "there is no file or folder no/such/folder"),
        (["--system", "x"], "takes no system message"),
        (["--max-total-tokens", "1"], "max_total_tokens must be from 2 to"),
        (["--session", __file__], "is not JSON"),
        (["--session", "/no/such/s.json"], "cannot write /no/such/s.json: there is no folder /no"),
        (["--prompt-cache", "x", "--no-prefix-cache"], "cannot be combined with --no-prefix"),
        (["--prompt-cache", __file__], "File exists"),
    ],
)
def test_mistakes(chat, arguments, message):
    out, error, status = chat(["x"], *arguments)
    assert status == 2 and out == "" and message in error.splitlines()[-1]


# --- a terminal ---------------------------------------------------------------------------------


# The fifth step of decode waits for Ctrl-C.
PROGRAM = """
import signal, sys
from tvm_pagedkv_lm.cli import main
from tvm_pagedkv_lm import DecoderModel

steps, original = [], DecoderModel.decode

def decode(self, cache, *arguments):
    steps.append(cache)
    logits = original(self, cache, *arguments)
    if len(steps) == 5:
        print("<waiting>", flush=True)
        signal.pause()
    return logits

DecoderModel.decode = decode
sys.exit(main())
"""


class Terminal:
    """The command in a pseudo-terminal."""

    def __init__(self, *arguments: str):
        import pty

        self.master, other = pty.openpty()
        command = [sys.executable, "-c", PROGRAM, "chat", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=lambda: _control(other),
            env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
        )
        os.close(other)
        self.text = ""
        self.has_grown = threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 4096)
            except OSError:  # the other end is closed
                data = b""
            with self.has_grown:
                self.text += data.decode("utf-8", "replace")
                self.has_grown.notify_all()
            if not data:
                return

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str, press: str = "") -> str:
        """Wait for text that matches; return what precedes its end, and forget it.

        A key that is pressed is pressed again: Python notes a signal that comes between the prompt
        and its read, and acts with the next one.
        """
        with self.has_grown:
            next_press = time.monotonic()
            deadline = next_press + 120
            while not (found := re.search(pattern, self.text, re.DOTALL)):
                assert time.monotonic() < deadline, f"no {pattern!r} in {self.text!r}"
                if press and time.monotonic() >= next_press:
                    self.send(press)
                    next_press += 5
                self.has_grown.wait(1.0)
            seen, self.text = self.text[: found.end()], self.text[found.end() :]
            return seen


def _control(terminal: int) -> None:
    """Let Ctrl-C in the terminal interrupt this process, also if tests run in the background."""
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a shell ignores for what it starts there
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def test_a_terminal_and_an_answer_that_is_stopped(tmp_path):
    pytest.importorskip("pty")
    session = tmp_path / "chat.json"
    terminal = Terminal(*GREEDY, "--session", str(session))
    try:
        terminal.wait_for("> ")
        terminal.send("/help\n")
        terminal.wait_for("Ctrl-C stops an answer.*> ")
        terminal.wait_for("/exit or Ctrl-D ends the conversation.*> ", press="\x03")
        terminal.send("The with statement\n")
        terminal.wait_for("The with statement.*\x1b\\[36m.*<waiting>")
        terminal.wait_for("stopped.*> ", press="\x03")
        terminal.send("A list is\n")
        terminal.wait_for("A list is.*\x1b\\[36m.*> ")
        terminal.send("/stats\n")
        terminal.wait_for("reused 2\\d of 3\\d prompt tokens.*> ")
        terminal.send("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        terminal.reader.join(10)
        os.close(terminal.master)
    _, stopped, second, whole = json.loads(session.read_text())["messages"]
    assert len(stopped["content"]) == 5 and second["content"] == "A list is"
    assert len(whole["content"]) == 16


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
