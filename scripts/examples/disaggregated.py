# SPDX-License-Identifier: Apache-2.0
"""Write some text with two processes: one computes the prompts, the other one continues them.

python scripts/examples/disaggregated.py "The with statement" "A list is"
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from pathlib import Path

from tvm_pagedkv.generation.disaggregated import serve_prefill
from tvm_pagedkv.generation.engine import FinishedEvent, SamplingParams, Statistics, generate
from tvm_pagedkv.models import DecoderModel
from tvm_pagedkv.transfer import NixlChannel, SharedMemoryChannel
from tvm_pagedkv.transfer.nixl import use_loopback

CHANNELS = {"shared_memory": SharedMemoryChannel, "nixl": NixlChannel}


def prefill_process(transport: str, address: str, directory: str | None, dtype: str) -> None:
    """Load the model, then compute what the other process asks for."""
    if transport == "nixl":
        use_loopback()
    model = DecoderModel.from_pretrained(directory, dtype)
    count = serve_prefill(model, CHANNELS[transport].connect(address))
    print(f"prefill process: computed {count} prompts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=["The with statement", "A list is"])
    parser.add_argument("--transport", choices=list(CHANNELS), default="shared_memory")
    parser.add_argument("--model", help="a Hugging Face directory; default: the small model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("-n", type=int, default=1, help="continuations of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare with a single process")
    options = parser.parse_args()
    if options.transport == "nixl":
        use_loopback()
    params = SamplingParams(n=options.n, max_tokens=options.max_tokens, seed=options.seed)

    model = DecoderModel.from_pretrained(options.model, options.dtype, progress=print)
    with tempfile.TemporaryDirectory() as directory:
        address = str(Path(directory) / "prefill")
        process = multiprocessing.get_context("spawn").Process(
            target=prefill_process,
            args=(options.transport, address, options.model, options.dtype),
            daemon=True,
        )
        process.start()
        channel = CHANNELS[options.transport].listen(address, timeout=120.0)
        texts = {}
        for event in generate(model, options.prompts, params, prefill_channel=channel):
            if isinstance(event, FinishedEvent):
                texts[event.prompt, event.continuation] = event.text
                print(
                    f"[{event.prompt + 1}.{event.continuation + 1}] "
                    f"{options.prompts[event.prompt]}{event.text}\n"
                )
            elif isinstance(event, Statistics):
                print(
                    f"{event.prefill_tokens} prompt tokens came from the prefill process, "
                    f"{event.decode_tokens} were decoded here"
                )
        process.join()
    if options.check:
        alone = {
            (event.prompt, event.continuation): event.text
            for event in generate(model, options.prompts, params)
            if isinstance(event, FinishedEvent)
        }
        assert texts == alone, "a single process writes something else"
        print("a single process writes the same")


if __name__ == "__main__":
    main()
