#!/usr/bin/env bash
# What is timed on one GPU, one script after another; nothing else may use it meanwhile.
#
#   bash benchmarks/timing_gpu.sh OUT_DIR
#
# Writes OUT_DIR/*_cuda.json and OUT_DIR/prototype_head_gpu/; copy them to docs/results and render each
# page. What fails is said at the end, and keeps nothing else from being run. SECONDS_EACH bounds each.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$1"
out=$(realpath "$1")
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=()

timed() { # NAME MODULE WORDS…
    local began=$SECONDS
    timeout "${SECONDS_EACH:-120}" python3 -m "benchmarks.$2" "${@:3}" >"$out/$1.log" 2>&1 || failed+=("$1")
    echo "$1: $((SECONDS - began)) s"
}

python3 -m prismlm corpus build sample --out "$work/corpus" --vocab-size 16384 >"$out/corpus.log" 2>&1
timed route prototype_head.route --device cuda --out "$out/route_cuda.json"
timed mixer prototype_mixer.timing --device cuda --out "$out/mixer_cuda.json" --limit 1 --throughput-rounds 3 --rounds 5
timed signal_noise signal_noise_attention.timing --device cuda --out "$out/signal_noise_cuda.json"
timed overhead uncertainty_feedback.overhead --device cuda --batch 8 --large-batch 32 --length 1024 --rounds 9 \
    --out "$out/uncertainty_overhead_cuda.json"
timed step prototype_head.step_time "$work/corpus" --recipes recipes/gpt2-small-gpu --steps "${STEPS:-20}" \
    --out "$out/prototype_head_gpu"
for name in "${failed[@]}"; do
    echo "$name failed or took too long:"
    tail -n 5 "$out/$name.log"
done
