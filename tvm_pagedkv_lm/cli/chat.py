# SPDX-License-Identifier: Apache-2.0
"""``tvm-pagedkv chat``: a conversation with a language model in the terminal."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .chat_screen import screen_of
from .model import add_model, add_plain_messages, choose_model
from .precision import add_precision
from .prompt_cache import add_prompt_cache, prefix_cache_of
from .sampling import add_sampling, given_sampling
from .statistics import reused
from .terminal import Progress, missing

HELP = """\
/help        this list
/reset       forget all turns
/trim        drop the oldest turn
/save FILE   write the conversation
/load FILE   continue a conversation that was written
/stats       tokens and times of the last answer, and the cache
/exit        end; so does Ctrl-D
Ctrl-C stops an answer; what was said stays"""


def add_parser(commands) -> None:
    """Add the command and its options."""
    add = commands.add_parser(
        "chat",
        help="talk with a language model in the terminal",
        description="Talk with a language model in the terminal. Every answer reuses the pages of "
        "the turns before it. A model without a chat template continues the text. /help lists the "
        "commands of the conversation.",
    )
    add.set_defaults(run=run)
    add_model(add)
    add.add_argument("--system", metavar="TEXT", help="system message before the conversation")
    add_plain_messages(add)
    add.add_argument(
        "--session",
        metavar="FILE",
        help="continue the conversation in this file, if it exists, and keep it there",
    )
    add.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="keep the pages of the session here at the end, so that nothing is computed again",
    )
    add_precision(add)
    add_sampling(add, 512, "answer")
    add.add_argument("--page-size", type=int, default=16, help="slots per page (default 16)")
    add.add_argument(
        "--max-total-tokens",
        type=int,
        help="length of the conversation (default: the model's context, and at most 4096)",
    )
    add.add_argument(
        "--prefill-chunk-size",
        type=int,
        default=512,
        help="maximum rows of a prefill step (default 512)",
    )
    add.add_argument(
        "--no-prefix-cache", action="store_true", help="compute all turns again for every answer"
    )
    add_prompt_cache(add)


def run(options: argparse.Namespace) -> None:
    """Talk until the input ends."""
    if options.checkpoint is not None and options.session is None:
        raise ValueError("--checkpoint needs --session")
    if options.prompt_cache is not None and options.no_prefix_cache:
        raise ValueError("--prompt-cache cannot be combined with --no-prefix-cache")
    for name in (options.session, options.checkpoint):
        if name is not None:  # now, not when the conversation is over
            _check_folder(Path(name))
    try:
        from ..engine.conversation import Conversation
        from ..engine.parameters import SamplingParams
        from ..model.model import DecoderModel
    except ModuleNotFoundError as error:
        raise missing(error, "chat") from None
    given = given_sampling(options)
    choose_model(options)
    with Progress():
        model = DecoderModel.from_pretrained(
            options.model,
            options.dtype,
            page_size=options.page_size,
            kv_dtype=options.kv_dtype,
            state_dtype=options.state_dtype,
            kv_scales=options.kv_scales,
            weights=options.weights,
            attention_budget=options.attention_budget,
            batch_invariant=options.batch_invariant,
        )
    conversation = Conversation(
        model,
        SamplingParams.for_model(model, **given),
        system=options.system,
        max_total_tokens=options.max_total_tokens,
        prefill_chunk_size=options.prefill_chunk_size,
        prefix_cache=prefix_cache_of(options, model),
        plain_messages=options.plain_messages,
    )
    chat = _Chat(conversation, options.session, options.checkpoint)
    try:
        chat.open_session()
        if options.system is not None:
            conversation.system = options.system
        chat.run()
    finally:
        if not conversation.close():
            chat.screen.note(f"{options.prompt_cache} did not take all pages in time")


def _check_folder(file: Path) -> None:
    """Raise a ValueError if a file cannot be written because of its folder."""
    if not file.parent.is_dir():
        raise ValueError(f"cannot write {file}: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK):
        raise ValueError(f"cannot write {file}: the folder {file.parent} is not writable")


class _Chat:
    """The loop over messages and commands.

    Parameters
    ----------
    conversation : Conversation
    session, checkpoint : str, optional
        Files that keep the conversation and its pages.
    """

    def __init__(self, conversation, session: str | None, checkpoint: str | None):
        self.conversation = conversation
        self.session, self.checkpoint = session, checkpoint
        self.screen = screen_of()
        self.commands = {
            "/help": self._help,
            "/reset": self._reset,
            "/trim": self._trim,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
        }

    def open_session(self) -> None:
        """Continue the session, if its file exists."""
        if self.session is not None and Path(self.session).exists():
            self._open(self.session, self.checkpoint)

    def run(self) -> None:
        """Read messages and commands until /exit or the end of the input."""
        self.screen.note("/help lists commands")
        try:
            while (line := self._read()) is not None:
                self._obey(line)
        finally:
            if self.session is not None:
                self._write(self.session, self.checkpoint)

    def _read(self) -> str | None:
        """Return the next line; None at the end."""
        try:
            line = self.screen.read()
        except KeyboardInterrupt:
            self.screen.note("/exit or Ctrl-D ends the conversation")
            return ""
        if line is None or line.split() == ["/exit"]:
            return None
        return line.removeprefix("\ufeff")  # a byte order mark, where a file is the input

    def _obey(self, line: str) -> None:
        """Run a command, or answer a message."""
        if not line.strip():
            return
        try:
            if not line.startswith("/"):
                return self._answer(line)
            name, _, argument = line.strip().partition(" ")
            if name not in self.commands:
                raise ValueError(f"no command {name}; /help lists them")
            self.commands[name](argument.strip())
        except (ValueError, OSError) as error:
            self.screen.note(str(error))

    def _answer(self, message: str) -> None:
        from ..engine.conversation import ContextFullError

        try:
            answer = self.conversation.reply(message)
        except ContextFullError as error:
            raise ValueError(f"{error}; /trim drops the oldest turn, /reset all") from None
        try:
            for piece in answer:
                self.screen.write(piece)
        except KeyboardInterrupt:
            answer.close()
        finally:
            self.screen.end()
        turn = self.conversation.last_turn
        reason = turn.finish_reason
        if turn.thought and not self.conversation.messages[-1]["content"]:
            self.screen.note("the model was still thinking when its answer ended")
        if reason == "context":
            self.screen.note("the context is full; /trim drops the oldest turn, /reset all")
        elif reason == "interrupted":
            self.screen.note("stopped")
        if self.session is not None:
            self._write(self.session, None)

    # --- commands -------------------------------------------------------------------------------

    def _help(self, _: str) -> None:
        self.screen.note(HELP)

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        self.screen.note("all turns are forgotten")

    def _trim(self, _: str) -> None:
        if not self.conversation.trim():
            raise ValueError("there are no turns")
        num_tokens, capacity = self.conversation.num_tokens(), self.conversation.capacity
        self.screen.note(f"the oldest turn is dropped; {num_tokens} of {capacity} tokens are left")

    def _save(self, name: str) -> None:
        if not name:
            raise ValueError("/save needs a file")
        self._write(name, None)
        self.screen.note(f"wrote {name}")

    def _load(self, name: str) -> None:
        if not name:
            raise ValueError("/load needs a file")
        self._open(name, None)

    def _stats(self, _: str) -> None:
        conversation, turn = self.conversation, self.conversation.last_turn
        s, cache = turn.statistics, conversation.cache.stats()
        lines = [f"{conversation.num_tokens()} of {conversation.capacity} tokens of the context"]
        if s.prompt_tokens:
            rate = f", {s.decode_tokens / s.decode_seconds:.0f} tokens/s" if s.decode_tokens else ""
            lines.append(
                f"last answer: {reused(s)}first token after "
                f"{turn.first_token_seconds * 1e3:.0f} ms{rate}"
            )
        lines.append(
            f"cache: {cache['num_cached_pages']} of {cache['num_pages']} pages kept, "
            f"{cache['allocated_bytes'] / 2**20:.1f} MiB"
        )
        self.screen.note("\n".join(lines))

    # --- files ----------------------------------------------------------------------------------

    def _open(self, name: str, checkpoint: str | None) -> None:
        from ..engine.session import load_session

        try:
            refusal = load_session(self.conversation, name, checkpoint=checkpoint)
        except OSError as error:
            raise ValueError(f"cannot read {name}: {error.strerror}") from None
        if refusal is not None:
            self.screen.note(f"{refusal}; the next answer computes the conversation anew")
        num_turns = len(self.conversation.messages) // 2
        self.screen.note(f"{name}: {num_turns} turns, {self.conversation.num_tokens()} tokens")

    def _write(self, name: str, checkpoint: str | None) -> None:
        from ..engine.session import save_session

        try:
            save_session(self.conversation, name, checkpoint=checkpoint)
        except OSError as error:
            raise ValueError(f"cannot write {name}: {error.strerror}") from None
