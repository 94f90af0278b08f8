# SPDX-License-Identifier: Apache-2.0
"""An agent with subagents: hints keep what comes again, and give up what does not.

python examples/agents.py
"""

import numpy as np

from tvm_pagedkv_lm import DecoderModel

SYSTEM = "You are an agent. Tools: read_file(path), write_file(path, text), run(command). " * 4
TASKS = ["Find the bug. ", "Write a test. ", "Mend the bug. ", "Run the tests. "]

model = DecoderModel.from_pretrained(progress=print)
cache = model.create_cache(max_num_sequences=1, max_total_tokens=768)
tokens_of = lambda text: model.tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731


def answer(prompt: list[int], num_tokens: int = 8) -> list[int]:
    """The prompt and the most likely tokens after it."""
    num_reused = cache.add_sequence(0, prompt)
    logits = model.prefill(cache, [0], [prompt[num_reused:]])
    text = [*prompt, int(np.argmax(logits[0]))]
    while len(text) < len(prompt) + num_tokens:
        text.append(int(np.argmax(model.decode(cache, [0], text[-1:])[0])))
    cache.record_tokens(0, text[num_reused:-1])
    cache.remove_sequence(0)
    return text


system = tokens_of(SYSTEM)
pin = cache.pin(system)  # all subagents begin with it
main = answer([*system, *tokens_of("Make the program work. ")])
waiting = cache.retain(main, ttl=300)  # while the subagents run
for task in TASKS:
    prompt = [*system, *tokens_of(task * 12)]
    print(f"{cache.match_prefix(prompt)} of {len(prompt)} tokens were there: {task}")
    cache.demote(answer(prompt))  # it has done its task
prompt = [*main, *tokens_of("The subagents have finished. ")]
num_reused = cache.match_prefix(prompt)
answer(prompt)
cache.release(waiting)
cache.release(pin)
print(f"the agent goes on: {num_reused} of {len(prompt)} tokens were there")
