# SPDX-License-Identifier: Apache-2.0
"""Write text with two processes: one computes the prompts, the other one continues them.

python examples/disaggregated.py "The with statement" "A list is"
"""

import argparse
import multiprocessing
import tempfile
from pathlib import Path

from tvm_pagedkv.transfer import NixlChannel, SharedMemoryChannel
from tvm_pagedkv.transfer.nixl import use_loopback
from tvm_pagedkv_lm import DecoderModel, FinishedEvent, SamplingParams, generate
from tvm_pagedkv_lm.engine.disaggregated import serve_prefill

CHANNELS = {"shared_memory": SharedMemoryChannel, "nixl": NixlChannel}


def prefill_process(transport: str, address: str, directory: str | None) -> None:
    """Load the model, then compute what the other process asks for, until it hangs up."""
    if transport == "nixl":
        use_loopback()
    model = DecoderModel.from_pretrained(directory)
    num_prompts = serve_prefill(model, CHANNELS[transport].connect(address))
    print(f"the prefill process has computed {num_prompts} prompts")


def texts_of(model, prompts, params, channel=None) -> list[str]:
    """The continuations; with a channel, the prompts are computed at its other end."""
    events = generate(model, prompts, params, kv_transfer_channel=channel)
    finished = [event for event in events if isinstance(event, FinishedEvent)]
    finished.sort(key=lambda event: event.prompt)
    return [prompts[event.prompt] + event.text for event in finished]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=["The with statement", "A list is"])
    parser.add_argument("--transport", choices=list(CHANNELS), default="shared_memory")
    parser.add_argument("--model", help="a Hugging Face directory; default: the small model")
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--check", action="store_true", help="compare with a single process")
    options = parser.parse_args()
    if options.transport == "nixl":
        use_loopback()
    params = SamplingParams(max_tokens=options.max_tokens)
    model = DecoderModel.from_pretrained(options.model, progress=print)

    with tempfile.TemporaryDirectory() as directory:
        address = str(Path(directory) / "prefill")  # a Unix socket in a folder of this user alone
        process = multiprocessing.get_context("spawn").Process(
            target=prefill_process, args=(options.transport, address, options.model), daemon=True
        )
        process.start()
        channel = CHANNELS[options.transport].listen(address, timeout=120.0)
        texts = texts_of(model, options.prompts, params, channel)
        process.join()
    print("\n\n".join(texts))
    if options.check:
        assert texts == texts_of(model, options.prompts, params), "a single process differs"
        print("\na single process writes the same")


if __name__ == "__main__":
    main()
