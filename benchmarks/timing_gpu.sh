#!/usr/bin/env bash
# Times what a GPU is for, within eight minutes; nothing else may use it meanwhile.
#
#   bash benchmarks/timing_gpu.sh [OUT_DIR, or $OUT] [--tiny] [--parts NAME…]
#
# Needs torch, transformers and what `pip install -e '.[train]'` brings; nothing is installed: src is
# on the path. What is missing is named first, and only the parts that use it fail. GIT_COMMIT names
# the commit where the history is not at hand. Writes OUT_DIR/gpu.json, anew after each part, and a log; put gpu.json into
# docs/results and render it with `python -m benchmarks.render gpu`.
# --tiny tries everything on a CPU, in seconds.
set -euo pipefail
cd "$(dirname "$0")/.."
export GIT_COMMIT=${GIT_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || true)}
: "${GIT_COMMIT:?name the commit that is timed: GIT_COMMIT=… bash benchmarks/timing_gpu.sh}"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec python3 -m benchmarks.gpu.timing "$@"
