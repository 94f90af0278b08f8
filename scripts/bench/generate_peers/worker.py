# SPDX-License-Identifier: Apache-2.0
"""The process of an engine: a line of JSON in, a line of JSON out."""

import json
import sys
import time


def serve(engine) -> None:
    """Answer until stdin ends.

    A request has ``tokens``, a prompt, and ``num_tokens``; the reply has ``prefill_s``, ``step_s``
    (a number for each step of decode) and ``text``, the most likely tokens.
    """
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prefill_s, token = engine.prefill(request["tokens"])
        text, step_s = [token], []
        for _ in range(request["num_tokens"] - 1):
            start = time.perf_counter()
            token = engine.decode(token)
            step_s.append(time.perf_counter() - start)
            text.append(token)
        print(json.dumps({"prefill_s": prefill_s, "step_s": step_s, "text": text}), flush=True)
