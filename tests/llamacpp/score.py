"""Mean nll of token ids by llama.cpp: `score.py FILE IDS CONTEXT`, IDS a JSON list of rows; prints JSON.

Run in an environment with llama-cpp-python alone.
"""

import json
import sys

import numpy as np
from llama_cpp import Llama

file, ids, context = sys.argv[1:]
rows, size = json.loads(ids), int(context)
unset = {"yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0, "yarn_attn_factor": -1.0}  # its own would replace the file's
model = Llama(file, n_ctx=size, n_batch=size, logits_all=True, verbose=False, n_threads=1, **unset)
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
