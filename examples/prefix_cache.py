# SPDX-License-Identifier: Apache-2.0
"""A text that grows in turns: every turn begins with the pages of the turns before.

python examples/prefix_cache.py
"""

import numpy as np

from tvm_pagedkv_lm import DecoderModel

TURNS = ["The with statement ", "is used to wrap ", "the execution of a block ", "with methods "]
NUM_TOKENS = 16

model = DecoderModel.from_pretrained(progress=print)
cache = model.create_cache(max_num_sequences=1, max_total_tokens=1024)


def answer(prompt: list[int], finds_prefix: bool) -> tuple[list[int], int]:
    """The most likely tokens after a prompt, and how many of its tokens were not computed."""
    num_reused = cache.add_sequence(0, prompt if finds_prefix else None)
    logits = model.prefill(cache, [0], [prompt[num_reused:]])
    tokens = [int(np.argmax(logits[0]))]
    while len(tokens) < NUM_TOKENS:
        logits = model.decode(cache, [0], tokens[-1:])
        tokens.append(int(np.argmax(logits[0])))
    if finds_prefix:
        # All but the last token have rows in the cache. Their pages are found from now on.
        cache.record_tokens(0, [*prompt, *tokens][num_reused:-1])
    cache.remove_sequence(0)
    return tokens, num_reused


text: list[int] = []
for turn in TURNS:
    text += model.tokenizer.encode(turn, add_special_tokens=not text).ids
    tokens, num_reused = answer(text, finds_prefix=True)
    assert tokens == answer(text, finds_prefix=False)[0]
    print(f"{num_reused} of {len(text)} tokens were there")
    text += tokens
print(model.tokenizer.decode(text).replace("\n", " "))
stats = cache.stats()
print(f"{stats['num_reused_tokens']} of {stats['num_looked_up_tokens']} tokens were not computed")
