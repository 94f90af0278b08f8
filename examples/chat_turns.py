# SPDX-License-Identifier: Apache-2.0
"""A conversation of five turns: the time to the first token, with and without reuse.

python examples/chat_turns.py

Larger models save more: ``--model DIR --dtype bfloat16 --message-tokens 300``.
"""

import argparse

from tvm_pagedkv_lm import Conversation, DecoderModel, SamplingParams

TEXT = "The with statement is used to wrap the execution of a block with methods. "

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", metavar="DIR", help="default: the small included model")
parser.add_argument("--dtype")
parser.add_argument("--message-tokens", type=int, default=60, help="default 60")
parser.add_argument("--answer-tokens", type=int, default=24, help="default 24")
options = parser.parse_args()

model = DecoderModel.from_pretrained(options.model, options.dtype, progress=print)
params = SamplingParams(temperature=0, max_tokens=options.answer_tokens)
warm = Conversation(model, params)
cold = Conversation(model, params, prefix_cache=False)
ids = model.tokenizer.encode(TEXT * options.message_tokens, add_special_tokens=False).ids
message = model.tokenizer.decode(ids[: options.message_tokens])

for turn in range(1, 6):
    answers = ["".join(conversation.reply(message)) for conversation in (warm, cold)]
    assert answers[0] == answers[1]
    seconds = [conversation.last_turn.first_token_seconds for conversation in (warm, cold)]
    statistics = warm.last_turn.statistics
    print(
        f"turn {turn}: reused {statistics.reused_tokens} of {statistics.prompt_tokens} tokens; "
        f"first token after {seconds[0] * 1e3:.0f} ms, without reuse {seconds[1] * 1e3:.0f} ms"
    )
