# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding with a token tree: draft, verify all drafts in one step, commit a path.

python examples/speculative.py
"""

from tvm_pagedkv_lm import DecoderModel

PROMPT = """object.__add__(self, other)
object.__sub__(self, other)
object.__mul__(self, other)
object."""
NUM_TOKENS, DEPTH, NUM_MATCHES = 60, 8, 3


def draft(text: list[int]) -> tuple[list[int], list[int]]:
    """A token tree below the last token: what followed the last two tokens where they were before.

    Returns the tokens of the nodes, and the parent of each (-1: the node follows the cached text).
    """
    tokens, parents = [text[-1]], [-1]  # node 0 is the last token, which is not in the cache yet
    matches = [i for i in range(2, len(text)) if text[i - 2 : i] == text[-2:]]
    for begin in matches[-NUM_MATCHES:]:
        node = 0
        for token in text[begin : begin + DEPTH]:
            tokens.append(token)
            parents.append(node)
            node = len(tokens) - 1
    return tokens, parents


def accept(tokens: list[int], parents: list[int], best: list[int]) -> tuple[int, list[int]]:
    """Follow the model's choices down the tree: the last right node, and the tokens chosen."""
    node, chosen = 0, [best[0]]
    while True:
        children = [i for i, parent in enumerate(parents) if parent == node]
        right = [i for i in children if tokens[i] == best[node]]
        if not right:
            return node, chosen
        node = right[0]
        chosen.append(best[node])


model = DecoderModel.from_pretrained(progress=print)
cache = model.create_cache(max_num_sequences=1, max_total_tokens=1024)
cache.add_sequence(0)
prompt = model.tokenizer.encode(PROMPT).ids
text = [*prompt, int(model.prefill(cache, [0], [prompt])[0].argmax())]
num_steps = 0
while len(text) < len(prompt) + NUM_TOKENS:
    tokens, parents = draft(text)
    (logits,) = model.logits(cache, [0], [tokens], [parents])  # one step for the whole tree
    leaf, chosen = accept(tokens, parents, logits.argmax(axis=1).tolist())
    cache.commit_tree([0], [leaf])  # keeps the path to the leaf; the other nodes are dropped
    text += chosen
    num_steps += 1
assert cache.sequence_length(0) == len(text) - 1

# The same text without drafts.
cache.add_sequence(1)
plain = [*prompt, int(model.prefill(cache, [1], [prompt])[0].argmax())]
while len(plain) < len(text):
    plain.append(int(model.decode(cache, [1], plain[-1:])[0].argmax()))
assert text == plain, "drafts change the speed, not the text"
print(model.tokenizer.decode(text))
print(f"{len(text) - len(prompt)} tokens in {num_steps} steps")
