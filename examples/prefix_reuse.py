# SPDX-License-Identifier: Apache-2.0
"""Several texts over one prompt: the prompt is computed once, and its pages are shared.

python examples/prefix_reuse.py
"""

import numpy as np

from tvm_pagedkv_lm import DecoderModel

PROMPT = "The with statement is used to wrap the execution of a block with methods defined by "
ENDINGS = ["a context manager", "the class of an object", "a function"]
NUM_TOKENS = 24
PARENT = 0

model = DecoderModel.from_pretrained(progress=print)
encode = model.tokenizer.encode
cache = model.create_cache(max_num_sequences=4, max_total_tokens=1024)

# The prompt, once. Its pages stay with PARENT, which goes on serving as a prefix.
cache.add_sequence(PARENT)
model.prefill(cache, [PARENT], [encode(PROMPT).ids])
num_prompt_pages = cache.stats()["num_used_pages"]

# A fork shares the pages of its parent. The last page, which is not full, is copied when the fork
# first writes to it.
ids = list(range(1, 1 + len(ENDINGS)))
for seq_id in ids:
    cache.fork_sequence(PARENT, seq_id)
assert cache.stats()["num_used_pages"] == num_prompt_pages

# The endings are appended in one step, then every text grows by a token a step.
texts = [encode(ending, add_special_tokens=False).ids for ending in ENDINGS]
logits = model.prefill(cache, ids, texts)
for _ in range(NUM_TOKENS):
    tokens = np.argmax(logits, axis=1).tolist()
    texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
    logits = model.decode(cache, ids, tokens)

for text in texts:
    print(PROMPT + model.tokenizer.decode(text).replace("\n", " "))
stats = cache.stats()
print(f"{stats['num_shared_pages']} of {stats['num_used_pages']} pages in use are shared")
