#!/usr/bin/env bash
# GPT-2 small's shape with 16,384 prototypes on one GPU, on the Parquet files of one folder.
#
#   bash benchmarks/prototype_head/gpu.sh PARQUET_DIR OUT_DIR [KEY=VALUE …, as of prismlm train --set]
#
# Writes OUT_DIR/prototype_head_gpu/*.json; copy it to docs/results/ and render it with
# `python3 -m benchmarks.render prototype_head`.
set -euo pipefail
cd "$(dirname "$0")/../.."
parquet=$1 out=$2
shift 2
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m prismlm corpus build "$parquet"/*.parquet --out "$work/corpus-gpu" --vocab-size 16384
results=$out/prototype_head_gpu
python3 -m benchmarks.prototype_head.step_time "$work/corpus-gpu" --recipes recipes/gpt2-small-gpu --steps 40 \
    --set "$@" --out "$results"
python3 -m benchmarks.prototype_head.measure "$work/corpus-gpu" detached --recipes recipes/gpt2-small-gpu \
    --set "$@" --out "$results"
