# SPDX-License-Identifier: Apache-2.0
"""``tvm-pagedkv generate``: continue prompts with a language model."""

from __future__ import annotations

import argparse
import codecs
import sys
from collections import deque
from pathlib import Path

from .model import add_model, add_plain_messages, choose_model
from .precision import add_precision
from .prompt_cache import add_prompt_cache, prefix_cache_of
from .sampling import add_sampling, given_sampling
from .statistics import MachineLimits, print_statistics
from .terminal import Progress, display_of, missing

DEFAULT_DRAFTS = 8
DEFAULT_SINKS = 4  # enough for the attention sinks of common models


def add_parser(commands) -> None:
    """Add the command and its options."""
    add = commands.add_parser(
        "generate",
        help="continue prompts with a language model",
        description="Continue prompts with a language model, several at a time.",
    )
    add.set_defaults(run=run)
    add.add_argument("text", nargs="*", metavar="PROMPT", help="a prompt")
    add.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    add.add_argument("--file", action="append", default=[], help="a UTF-8 file that is a prompt")
    add.add_argument(
        "--files", nargs="+", default=[], metavar="FILE", help="UTF-8 files, each of them a prompt"
    )
    add_model(add)
    add.add_argument(
        "--chat", action="store_true", help="answer each prompt, using the model's chat template"
    )
    add.add_argument("--system", metavar="TEXT", help="system message before each prompt of a chat")
    add_plain_messages(add)
    add_precision(add)
    add.add_argument("-n", type=int, default=1, help="continuations of each prompt (default 1)")
    add_sampling(add, 200, "continuation")
    add.add_argument("--page-size", type=int, default=16, help="slots per page (default 16)")
    add.add_argument(
        "--max-total-tokens", type=int, help="capacity of the cache (default: as needed)"
    )
    add.add_argument(
        "--prefill-chunk-size",
        type=int,
        default=512,
        help="maximum rows of a prefill step (default 512)",
    )
    add.add_argument(
        "--no-prefix-cache",
        action="store_true",
        help="compute every prompt from its beginning, even if another one begins the same",
    )
    add_prompt_cache(add)
    add.add_argument(
        "--sliding-window", type=int, metavar="W", help="keep W tokens of each text (default: all)"
    )
    add.add_argument(
        "--sinks",
        type=int,
        metavar="S",
        help="attention sinks: of these W, keep the first S (default 4)",
    )
    add.add_argument("--shards", type=int, default=1, help="processes per layer (default 1)")
    add.add_argument("--stages", type=int, default=1, help="number of pipeline stages (default 1)")
    add.add_argument(
        "--speculative",
        type=_drafts,
        nargs="?",
        const=DEFAULT_DRAFTS,
        default=0,
        metavar="N",
        help="speculative decoding: draft up to N tokens by prompt lookup and verify them in one "
        f"step (default {DEFAULT_DRAFTS}); put it after the prompts",
    )
    add.add_argument(
        "--measure",
        action="store_true",
        help="measure the machine, and print the share of its limits that was reached",
    )
    add.add_argument("--draw-pages", metavar="FILE", help="write an SVG of the pages at peak use")


def _drafts(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise argparse.ArgumentTypeError(
            f"the number of tokens to draft must be at least 1, got {text!r} (put prompts first)"
        )
    return int(text)


def run(options: argparse.Namespace) -> None:
    """Continue the prompts; print the texts, then statistics."""
    prompts = _prompts(options)
    picture = _picture_file(options.draw_pages)
    _check(options)
    try:
        from ..engine.answer_parts import said
        from ..engine.engine import generate
        from ..engine.events import FinishedEvent, Statistics
        from ..engine.parameters import SamplingParams, Window
    except ModuleNotFoundError as error:
        raise missing(error, "demo") from None
    from tvm_pagedkv.cache import PageMap

    window = None
    if options.sliding_window is not None:
        window = Window(options.sliding_window, _sinks(options))
    given = given_sampling(options)
    choose_model(options)
    with Progress():
        model = _load(options)
    params = SamplingParams.for_model(model, **given)
    if options.shards * options.stages > 1:
        _print_workers(model)
    shown: list[str] = prompts
    inputs: list = prompts
    if options.chat:
        inputs = _chat(model, prompts, options.system, options.plain_messages)
        shown = [f"{prompt}\n\n" for prompt in prompts] if len(prompts) * params.n > 1 else [""]
    fullest: deque[PageMap] = deque(maxlen=1)
    prefixes = _prefixes(model, inputs) if picture and options.prompt_cache else None

    def keep_page_map(cache) -> None:
        fullest.append(PageMap.of(getattr(cache, "first", cache), prefixes))

    events = generate(
        model,
        inputs,
        params,
        max_total_tokens=options.max_total_tokens,
        prefill_chunk_size=options.prefill_chunk_size,
        window=window,
        num_speculative_tokens=options.speculative,
        on_peak_usage=keep_page_map if picture else None,
        prefix_cache=prefix_cache_of(options, model),
    )
    if options.chat:
        events = said(events, model.tokenizer)
    with Progress() as progress, display_of(shown, params.n) as display:
        for event in events:
            progress.stop()
            if isinstance(event, Statistics):
                statistics = event
            elif isinstance(event, FinishedEvent):
                display.finished(event)
            else:
                display.text(event)
    print_statistics(statistics, _measured(model.options.dtype) if options.measure else None)
    if picture:
        picture.write_text(fullest[0].to_svg(), encoding="utf-8")
    if options.shards * options.stages > 1:
        model.close()  # not when the interpreter ends, where Ctrl-C finds no handler


def _check(options: argparse.Namespace) -> None:
    """Raise a ValueError if options do not go together."""
    if options.system is not None and not options.chat:
        raise ValueError("--system needs --chat")
    if options.plain_messages and not options.chat:
        raise ValueError("--plain-messages needs --chat")
    if options.sinks is not None and options.sliding_window is None:
        raise ValueError("--sinks needs --sliding-window")
    if options.prompt_cache is not None:
        for name in ("no_prefix_cache", "sliding_window"):
            if getattr(options, name):
                option = "--" + name.replace("_", "-")
                raise ValueError(f"--prompt-cache cannot be combined with {option}")
        if (options.shards, options.stages) != (1, 1):
            raise ValueError("--prompt-cache cannot be combined with --shards and --stages")
    if options.attention_budget is not None:
        if options.sliding_window is not None:
            raise ValueError("--attention-budget cannot be combined with --sliding-window")
        if (options.shards, options.stages) != (1, 1):
            raise ValueError("--attention-budget cannot be combined with --shards and --stages")
    if options.kv_scales != "row" and (options.shards, options.stages) != (1, 1):
        raise ValueError("--kv-scales checkpoint cannot be combined with --shards and --stages")
    if options.speculative and options.sliding_window is not None:
        raise ValueError("--speculative cannot be combined with --sliding-window")
    if options.speculative and (options.shards, options.stages) != (1, 1):
        raise ValueError("--speculative cannot be combined with --shards and --stages")


def _sinks(options: argparse.Namespace) -> int:
    if options.sinks is not None:
        return options.sinks
    return min(DEFAULT_SINKS, max(0, options.sliding_window - 1))


def _load(options: argparse.Namespace):
    """Load the model, for this process or for several workers."""
    from ..model.model import DecoderModel
    from ..parallel.parallel import ParallelModel

    common = {
        "page_size": options.page_size,
        "sliding_window": options.sliding_window is not None,
        "kv_dtype": options.kv_dtype,
        "state_dtype": options.state_dtype,
        "weights": options.weights,
        "batch_invariant": options.batch_invariant,
    }
    if (options.shards, options.stages) == (1, 1):
        return DecoderModel.from_pretrained(
            options.model,
            options.dtype,
            attention_budget=options.attention_budget,
            kv_scales=options.kv_scales,
            **common,
        )
    return ParallelModel.from_pretrained(
        options.model, options.dtype, num_shards=options.shards, stages=options.stages, **common
    )


def _chat(model, prompts: list[str], system: str | None, plain: bool) -> list[list[int]]:
    """Return the token ids of conversations with one user message each."""
    from ..text.chat_prompt import encode_chat

    before = [] if system is None else [{"role": "system", "content": system}]
    for index, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"prompt {index + 1} is empty")
    chats = [[*before, {"role": "user", "content": text}] for text in prompts]
    return [encode_chat(model, chat, plain_messages=plain) for chat in chats]


def _prefixes(model, prompts: list) -> dict[str, list[int]]:
    """Return the tokens of the prompts, for a picture of the tiers that have them."""
    from ..text.tokens import encode_text

    encoded = (encode_text(model.tokenizer, p) if isinstance(p, str) else p for p in prompts)
    return {f"prompt {index + 1}": tokens for index, tokens in enumerate(encoded)}


def _print_workers(model) -> None:
    """Print the part of the model that each worker has."""
    for index, worker in enumerate(model.workers()):
        parts = [f"{name} {_span(worker[name])}" for name in ("layers", "heads", "kv_heads")]
        line = f"worker {index}: process {worker['process']}, {', '.join(parts)}"
        print(line.replace("_", " "), file=sys.stderr, flush=True)


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _prompts(options: argparse.Namespace) -> list[str]:
    prompts = [*options.text, *options.prompt]
    for index, prompt in enumerate(prompts):
        if not prompt.isprintable() and any("\ud800" <= c <= "\udfff" for c in prompt):
            raise ValueError(f"prompt {index + 1} is not UTF-8 text")
    for name in (*options.file, *options.files):
        try:  # line ends stay as they are: models tell CRLF from LF
            prompts.append(Path(name).read_bytes().decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            reason = f"byte {error.object[error.start]:#04x} at offset {error.start}"
            if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                reason = "it is in UTF-16 or UTF-32"
            raise ValueError(f"prompt file {name} is not UTF-8 text: {reason}") from None
        except OSError as error:
            raise ValueError(f"cannot read prompt file {name}: {error.strerror}") from None
    if not prompts:
        raise ValueError('no prompt; for example: tvm-pagedkv generate "The with statement"')
    return prompts


def _picture_file(name: str | None) -> Path | None:
    """Return the file of the picture; raise a ValueError early if it cannot be written."""
    if name is None:
        return None
    try:
        with open(name, "a", encoding="utf-8"):
            return Path(name)
    except OSError as error:
        raise ValueError(f"cannot write page map {name}: {error.strerror}") from None


def _measured(dtype: str) -> MachineLimits:
    """Measure the machine."""
    from tvm_pagedkv.measure import Limits

    with Progress():
        limits = Limits()
    for _ in range(3):
        limits.read()
    return MachineLimits(limits.peak(dtype), limits.read_bandwidth)
