"""Log-probabilities by llama.cpp: `logs.py OUT IDS FILE …`, IDS a JSON list; writes (files, tokens, vocabulary).

Run in an environment with llama-cpp-python alone, whose own values for YaRN would stand before those of the file.
"""

import json
import sys

import numpy as np
from llama_cpp import Llama

out, ids, *files = sys.argv[1:]
tokens = json.loads(ids)
unset = {"yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0, "yarn_attn_factor": -1.0}
found = []
for file in files:
    size = len(tokens)
    model = Llama(file, n_ctx=size, n_batch=size, logits_all=True, verbose=False, n_threads=1, **unset)
    model.eval(tokens)
    scores = np.array(model.scores[:size], dtype=np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    found.append(scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)))
np.save(out, np.stack(found))
