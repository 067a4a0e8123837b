#!/usr/bin/env bash
# Times what a GPU is for, within eight minutes; nothing else may use it meanwhile.
#
#   bash benchmarks/timing_gpu.sh OUT_DIR [--tiny]
#
# Needs torch, transformers and what `pip install -e '.[train]'` brings; nothing is installed: src is
# on the path. GIT_COMMIT names the commit where the history is not at hand. Writes OUT_DIR/gpu.json,
# anew after each part, and gpu.log; a part that fails or takes too long is noted, and the next begins.
# Put gpu.json into docs/results and render it with `python -m benchmarks.render gpu`.
# --tiny tries everything on a CPU.
set -euo pipefail
out=$(realpath -m "${1:?name the folder to write to}")
cd "$(dirname "$0")/.."
export GIT_COMMIT=${GIT_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || true)}
: "${GIT_COMMIT:?name the commit that is timed: GIT_COMMIT=… bash benchmarks/timing_gpu.sh}"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
status=0
while read -r seconds part; do
    if timeout -k 5 "$seconds" python3 -m benchmarks.gpu.timing "$out" "$part" "${@:2}" \
        >>"$out/gpu.log" 2>&1 </dev/null; then
        echo "$part: done"
    else
        [ $? = 124 ] && why="took more than $seconds s" || why=$(tail -n 1 "$out/gpu.log")
        status=1
        echo "$part: failed: $why"
        python3 -m benchmarks.gpu.timing "$out" "$part" --failed "$why" </dev/null
    fi
done <<'PARTS'
50 head, gpt2-small
70 head, gpt2-xl
70 mixer
90 feedback
100 training
90 index
PARTS
rm -rf "$out/work"
exit $status
