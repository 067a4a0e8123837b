#!/usr/bin/env bash
# Heads on tens of millions of hidden states of one model, on one GPU.
#
#   bash benchmarks/attach/gpu.sh MODEL PARQUET_DIR OUT_DIR
#
# MODEL is a Hugging Face directory. GB bounds the states on disk (1,156 bytes a state at width 576),
# STEPS and BATCH the fit, SIZES the numbers of prototypes. Writes OUT_DIR/attach/*.json; copy them to
# docs/results/attach and render with `python3 -m benchmarks.render smollm2`.
set -euo pipefail
cd "$(dirname "$0")/../.."
model=$1 parquet=$2 out=$3
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
python3 -m prismlm corpus build "$parquet"/*.parquet --tokenizer "$model" --out "$work/corpus"
frontier="python3 -m benchmarks.attach.frontier"
$frontier states "$model" "$work/corpus" --work "$work" --gb "${GB:-50}"
for prototypes in ${SIZES:-8192 32768}; do
    head="--work $work --out $out/attach --prototypes $prototypes --per-token 64 --weights fitted"
    $frontier fit "$model" $head --steps "${STEPS:-20000}" --batch "${BATCH:-2048}"
    $frontier control "$model" $head
done
