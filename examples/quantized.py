# SPDX-License-Identifier: Apache-2.0
"""The same text from caches that keep K and V in fewer bits: what they take, what they change.

python examples/quantized.py
"""

import numpy as np

from tvm_pagedkv_lm import DecoderModel

PROMPT = "The with statement is used to wrap the execution of a block with methods defined by "
NUM_TOKENS = 24
KV_DTYPES = "float32", "int8", "float8_e4m3fn", "int4"


def continued(kv_dtype: str) -> tuple[list[int], np.ndarray, int]:
    """Return the most likely tokens, the first step's probabilities, and the bytes of the pages."""
    model = DecoderModel.from_pretrained(dtype="float32", kv_dtype=kv_dtype)
    cache = model.create_cache(max_num_sequences=1, max_total_tokens=256)
    cache.add_sequence(0)
    logits = model.prefill(cache, [0], [model.tokenizer.encode(PROMPT).ids])
    exponentials = np.exp(logits[0] - logits[0].max())
    tokens: list[int] = []
    while len(tokens) < NUM_TOKENS:
        tokens.append(int(np.argmax(logits)))
        logits = model.decode(cache, [0], tokens[-1:])
    return tokens, exponentials / exponentials.sum(), cache.stats()["page_pool_bytes"]


exact, exact_probabilities, exact_bytes = continued(KV_DTYPES[0])
for kv_dtype in KV_DTYPES[1:]:
    tokens, probabilities, num_bytes = continued(kv_dtype)
    # Kullback-Leibler divergence of the first token's distribution, in nats.
    divergence = (exact_probabilities * np.log(exact_probabilities / probabilities)).sum()
    # Near-ties may resolve differently, and from there on the texts differ.
    differs = [a != b for a, b in zip(tokens, exact, strict=True)]
    num_same = differs.index(True) if any(differs) else NUM_TOKENS
    print(
        f"{kv_dtype}: 1/{exact_bytes / num_bytes:.1f} of the bytes, divergence {divergence:.1e}, "
        f"{num_same} tokens before the text differs from that of {KV_DTYPES[0]}"
    )
