# SPDX-License-Identifier: Apache-2.0
"""The command ``tvm-pagedkv``: generate text, or tell about the installation."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ..generation.speculative import DEFAULT_DRAFTS
from .terminal import Progress, display_of

EXIT_MISTAKE = 2
DEFAULT_SINKS = 4  # enough for the attention that models park on their first tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; a mistake ends with one sentence on stderr and exit code 2."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        print(f"tvm-pagedkv: error: {_sentence(error)}", file=sys.stderr)
        return EXIT_MISTAKE
    return 0


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tvm-pagedkv", description="A paged KV cache for Apache TVM, at work."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser(
        "generate",
        help="continue prompts with a language model",
        description="Continue prompts with a language model (Llama, Mistral, Qwen, Gemma, Phi, "
        "OLMo), several at a time.",
    )
    add.set_defaults(run=_generate)
    add.add_argument("text", nargs="*", metavar="PROMPT", help="a prompt")
    add.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    add.add_argument("--file", action="append", default=[], help="a UTF-8 file that is a prompt")
    add.add_argument(
        "--model", metavar="DIR", help="Hugging Face directory (default: the small included model)"
    )
    add.add_argument(
        "--chat", action="store_true", help="answer each prompt, by the chat template of the model"
    )
    add.add_argument("--system", metavar="TEXT", help="system message before each prompt of a chat")
    add.add_argument(
        "--dtype", help="float32, float16 or bfloat16 (default: what the model's config.json says)"
    )
    add.add_argument("-n", type=int, default=1, help="continuations of each prompt (default 1)")
    add.add_argument("--temperature", type=float, default=0.7, help="default 0.7; 0: most likely")
    add.add_argument("--top-p", type=float, default=0.95, help="default 0.95")
    add.add_argument("--seed", type=int, default=0)
    add.add_argument("--max-tokens", type=int, default=200, help="per continuation (default 200)")
    add.add_argument("--page-size", type=int, default=16, help="tokens of a page (default 16)")
    add.add_argument(
        "--max-total-tokens", type=int, help="capacity of the cache (default: what is needed)"
    )
    add.add_argument("--chunk", type=int, default=512, help="rows of a prefill step (default 512)")
    add.add_argument(
        "--sliding-window", type=int, metavar="W", help="keep W tokens of each text (default: all)"
    )
    add.add_argument("--sinks", type=int, metavar="S", help="of these, the first S (default 4)")
    add.add_argument(
        "--shards", type=int, default=1, help="processes that share every layer (default 1)"
    )
    add.add_argument(
        "--stages", type=int, default=1, help="pipeline stages of so many processes (default 1)"
    )
    add.add_argument(
        "--speculative",
        type=_drafts,
        nargs="?",
        const=DEFAULT_DRAFTS,
        default=0,
        metavar="N",
        help="draft up to N tokens at a time from what the text repeats, and verify them in one "
        f"step (default {DEFAULT_DRAFTS}); say it after the prompts",
    )
    add.add_argument(
        "--draw-pages", metavar="FILE", help="write an SVG of the pages at their fullest"
    )
    add = commands.add_parser(
        "bundle",
        help="write a folder with compiled kernels and the libraries that run them",
        description="Write a folder from which caches can be made without a compiler.",
    )
    add.set_defaults(run=_bundle)
    add.add_argument("--out", required=True, metavar="DIR", help="the folder, new or empty")
    add.add_argument(
        "--target",
        action="append",
        choices=["cpu", "cuda"],
        default=[],
        help="may be repeated (default: cpu); cuda needs nvcc, but no GPU",
    )
    add.add_argument(
        "--config", metavar="FILE", required=True, help="JSON with the fields of KVCacheConfig"
    )
    add.add_argument(
        "--cpu",
        action="append",
        metavar="NAME",
        help="native (default), a CPU such as x86-64-v3, or aarch64-linux-gnu[:CPU]; may be "
        "repeated, and the best one is chosen where the bundle is loaded",
    )
    add.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="NUMBER",
        help="GPU architecture such as 90, for --target cuda; may be repeated, and later ones run "
        "PTX of the first",
    )
    add.add_argument(
        "--libraries",
        action="append",
        default=[],
        metavar="DIR",
        help="libraries of another architecture to include",
    )
    add = commands.add_parser(
        "export",
        help="write a folder with a compiled model and the libraries that run it",
        description="Write a folder from which a C++ program runs a model without a compiler.",
    )
    add.set_defaults(run=_export)
    add.add_argument("--out", required=True, metavar="DIR", help="the folder, new or empty")
    add.add_argument(
        "--model", metavar="DIR", help="Hugging Face directory (default: the small included model)"
    )
    add.add_argument(
        "--dtype", help="float32, float16 or bfloat16 (default: what the model's config.json says)"
    )
    add.add_argument("--page-size", type=int, default=16, help="tokens of a page (default 16)")
    add.add_argument("--cpu", metavar="NAME", help="native (default), or a CPU such as x86-64-v3")
    add = commands.add_parser("info", help="versions, target, threads and folders in force")
    add.set_defaults(run=_info)
    return parser


def _drafts(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise argparse.ArgumentTypeError(
            f"the most tokens to draft must be 1 or more, got {text!r} (a prompt may not follow)"
        )
    return int(text)


# --- generate -----------------------------------------------------------------------------------


def _generate(options: argparse.Namespace) -> None:
    prompts = _prompts(options)
    picture = _picture_file(options.draw_pages)
    try:
        from ..generation.engine import FinishedEvent, SamplingParams, Statistics, Window, generate
        from ..models import DecoderModel, ParallelModel
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{error.name} is not installed; install what this command needs with: "
            "pip install 'tvm-pagedkv[demo]'"
        ) from None
    from ..cache.page_map import PageMap

    if options.system is not None and not options.chat:
        raise ValueError("--system needs --chat")
    fullest: deque[PageMap] = deque(maxlen=1)
    params = SamplingParams(
        options.n, options.temperature, options.top_p, options.max_tokens, options.seed
    )
    window = None
    if options.sliding_window is not None:
        default = min(DEFAULT_SINKS, max(0, options.sliding_window - 1))
        window = Window(options.sliding_window, default if options.sinks is None else options.sinks)
    elif options.sinks is not None:
        raise ValueError("--sinks needs --sliding-window")
    if window is not None and options.speculative:
        raise ValueError("--speculative does not go with --sliding-window")
    if options.speculative and (options.shards, options.stages) != (1, 1):
        raise ValueError("--speculative does not go with --shards and --stages")
    with Progress() as progress:
        load = DecoderModel.from_pretrained
        if (options.shards, options.stages) != (1, 1):
            load = functools.partial(
                ParallelModel.from_pretrained, num_shards=options.shards, stages=options.stages
            )
        model = load(
            options.model,
            options.dtype,
            page_size=options.page_size,
            sliding_window=window is not None,
            progress=progress,
        )
    if isinstance(model, ParallelModel):
        _print_workers(model)
    shown: list[str] = prompts
    inputs: list = prompts
    if options.chat:
        inputs = _chat(model, prompts, options.system)
        shown = [f"{prompt}\n\n" for prompt in prompts] if len(prompts) * params.n > 1 else [""]
    events = generate(
        model,
        inputs,
        params,
        max_total_tokens=options.max_total_tokens,
        prefill_chunk_size=options.chunk,
        window=window,
        speculative=options.speculative,
        at_fullest=(lambda cache: fullest.append(PageMap.of(getattr(cache, "first", cache))))
        if picture
        else None,
    )
    with display_of(shown, params.n) as display:
        for event in events:
            if isinstance(event, Statistics):
                statistics = event
            elif isinstance(event, FinishedEvent):
                display.finished(event)
            else:
                display.text(event)
    _print_statistics(statistics, model.options.dtype)
    if picture:
        picture.write_text(fullest[0].to_svg(), encoding="utf-8")


def _chat(model, prompts: list[str], system: str | None) -> list[list[int]]:
    """Token ids of conversations that each have one message of the user."""
    from ..models.chat import encode_chat

    before = [] if system is None else [{"role": "system", "content": system}]
    for index, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"prompt {index + 1} is empty")
    return [encode_chat(model, [*before, {"role": "user", "content": text}]) for text in prompts]


def _print_workers(model) -> None:
    """Who has which part of the model."""
    for index, worker in enumerate(model.workers()):
        parts = [f"{name} {_span(worker[name])}" for name in ("layers", "heads", "kv_heads")]
        line = f"worker {index}: process {worker['process']}, {', '.join(parts)}"
        print(line.replace("_", " "), file=sys.stderr, flush=True)


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _prompts(options: argparse.Namespace) -> list[str]:
    prompts = [*options.text, *options.prompt]
    for name in options.file:
        try:
            prompts.append(Path(name).read_bytes().decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"prompt file {name} is not UTF-8 text: byte {error.object[error.start]:#04x} at "
                f"offset {error.start}"
            ) from None
        except OSError as error:
            raise ValueError(f"cannot read prompt file {name}: {error.strerror}") from None
    if not prompts:
        raise ValueError('no prompt; say, for example: tvm-pagedkv generate "The with statement"')
    return prompts


def _picture_file(name: str | None) -> Path | None:
    """Where to draw; what cannot be written fails before anything takes time."""
    if name is None:
        return None
    try:
        with open(name, "a", encoding="utf-8"):
            return Path(name)
    except OSError as error:
        raise ValueError(f"cannot write page map {name}: {error.strerror}") from None


def _print_statistics(s, dtype: str) -> None:
    from ..limits import Limits

    limits = Limits()
    for _ in range(3):
        limits.read()

    def rate(tokens: int, seconds: float, work: int, limit: float, of: str) -> str:
        if not seconds:
            return f"{tokens} tokens"
        share = f" ({work / seconds / limit:.0%} of {of})" if work else ""
        return f"{tokens} tokens, {tokens / seconds:.0f} tokens/s{share}"

    prefill = s.prefill_flops, limits.peak(dtype), "the multiplication peak"
    decode = s.decode_bytes, limits.read_bandwidth, "the read bandwidth"
    mebibytes = s.cache_bytes / 2**20
    memory = f"{mebibytes:.1f} MiB" if mebibytes >= 1 else f"{s.cache_bytes / 2**10:.0f} KiB"
    if s.drafted_tokens:
        drafts = (
            f"accepted {s.accepted_tokens} of {s.drafted_tokens} drafted tokens "
            f"({s.accepted_tokens / s.drafted_tokens:.0%}), "
            f"{s.decode_tokens / (s.decode_tokens - s.accepted_tokens):.2f} tokens a step; "
        )
    else:
        drafts = ""
    print(
        f"prefill {rate(s.prefill_tokens, s.prefill_seconds, *prefill)}; "
        f"decode {rate(s.decode_tokens, s.decode_seconds, *decode)}; "
        f"{drafts}pages {s.pages_used} of {s.pages_total} used, {s.pages_shared} shared "
        f"(of {s.page_size}); cache {memory}",
        file=sys.stderr,
    )


# --- bundle ------------------------------------------------------------------------------------


def _bundle(options: argparse.Namespace) -> None:
    import json

    from ..bundle.load import read_config
    from ..bundle.writer import write_bundle

    try:
        config = read_config(json.loads(Path(options.config).read_bytes()))
    except OSError as error:
        raise ValueError(f"cannot read {options.config}: {error.strerror}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{options.config}: {error}") from None
    targets = list(options.cpu or [])
    if not targets and ("cpu" in options.target or not options.target):
        targets = ["native"]
    if "cuda" in options.target:
        if not options.arch:
            raise ValueError("--target cuda needs architectures, such as --arch 80 --arch 90")
        targets.append("cuda")
    elif options.arch:
        raise ValueError("--arch needs --target cuda")
    with Progress() as progress:
        path = write_bundle(
            config,
            options.out,
            targets,
            archs=options.arch,
            libraries=options.libraries,
            progress=progress,
        )
    _print_size(path)


def _print_size(path: Path) -> None:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    print(f"{path}: {size / 2**20:.1f} MiB")


# --- export -------------------------------------------------------------------------------------


def _export(options: argparse.Namespace) -> None:
    from ..models.export import export_model

    with Progress() as progress:
        path = export_model(
            options.model,
            options.out,
            options.dtype,
            page_size=options.page_size,
            target=options.cpu,
            progress=progress,
        )
    _print_size(path)


# --- info ---------------------------------------------------------------------------------------


def _info(_: argparse.Namespace) -> None:
    from importlib.metadata import PackageNotFoundError, version

    from .. import __version__
    from .._library import path as library_path
    from ..compiler.build import resolve_target, vector_target
    from ..compiler.cache_folder import cache_dir
    from ..threads import available_cpus, num_threads

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    target = resolve_target()
    traits = vector_target(target)
    files = [file for file in cache_dir().rglob("*") if file.is_file()]
    megabytes = sum(file.stat().st_size for file in files) / 2**20
    rows = {
        "tvm-pagedkv": __version__,
        "apache-tvm": installed("apache-tvm"),
        "apache-tvm-ffi": installed("apache-tvm-ffi"),
        "library": library_path(),
        "target": f"{target.kind.name}, {target.attrs.get('mcpu', 'generic CPU')}",
        "CPU": f"{traits.lanes} float32 lanes, {traits.registers} registers, "
        f"bfloat16 dot product: {'yes' if traits.has_bf16_dot else 'no'}, "
        f"float16 conversion: {'yes' if traits.has_f16_convert else 'no'}",
        "threads": f"{num_threads()} of {len(available_cpus())} CPUs that the process may use",
        "compiled files": f"{cache_dir()} ({len(files)} files, {megabytes:.1f} MiB)",
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    sys.exit(main())
