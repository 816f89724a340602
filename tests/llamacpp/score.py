"""Mean nll of token ids by llama.cpp: `score.py FILE IDS CONTEXT`, IDS a JSON list of rows; prints JSON.

Run in an environment with llama-cpp-python alone.
"""

import json
import sys

import numpy as np
from llama_cpp import Llama

file, ids, context = sys.argv[1:]
rows = json.loads(ids)
model = Llama(file, n_ctx=int(context), n_batch=int(context), logits_all=True, verbose=False, n_threads=1)
total, count = 0.0, 0
for row in rows:
    model.reset()
    model.eval(row)
    scores = np.array(model.scores[: len(row) - 1], dtype=np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    total -= logs[np.arange(len(row) - 1), row[1:]].sum()
    count += len(row) - 1
print(json.dumps(total / count))
