#!/usr/bin/env bash
# The four models of the studies at full length, and then GLUE on them, on one GPU.
#
#   bash benchmarks/prototype_mixer/gpu.sh train TEXTS_DIR WORK_DIR OUT_DIR
#   bash benchmarks/prototype_mixer/gpu.sh glue GLUE_DIR WORK_DIR OUT_DIR
#
# The models, and in `glue` their seeds too, run side by side: a step of one leaves most of a GPU idle.
# What was stopped goes on where WORK_DIR is still there. MODELS names some, STEPS is that of a long
# run, LIMIT, DEV_LIMIT and SEARCH_LIMIT the rows of a task: the small ones have less than 10,000 and are
# read in full.
# Writes OUT_DIR/four_models.tar, glue.tar: unpack them in docs/results/prototype_mixer/ and render;
# and OUT_DIR/MODEL.tar, which belongs in benchmarks/prototype_mixer/models/.
set -euo pipefail
cd "$(dirname "$0")/../.."
part=$1 data=$(realpath "$2")
mkdir -p "$3" "$4"
work=$(realpath "$3") out=$(realpath "$4")
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
models=${MODELS:-llama protot mamba2 deltanet}

# Wait for all; fail if one did.
ended() { for job in $(jobs -p); do wait "$job"; done; }

if [ "$part" = train ]; then
    four="python3 -m benchmarks.prototype_mixer.four_models $work/corpus"
    results=$work/four_models
    mkdir -p "$results"
    # The rates that the short runs found.
    cp docs/results/prototype_mixer/four_models/*-*.json "$results"
    [ -d "$work/corpus" ] || $four corpus --texts "$data"
    for model in $models; do
        $four train --only "$model" --steps "${STEPS:-11000}" --threads 1 --work "$work/runs" --out "$results" &
    done
    ended
    for model in $models; do
        $four keep --only "$model" --steps "${STEPS:-11000}" --work "$work/runs" --models "$work/models"
        tar -cf "$out/$model.tar" -C "$work/models" "$model"
    done
    tar -cf "$out/four_models.tar" -C "$work" four_models
    exit
fi

glue() { # SEED MODEL WORDS…
    python3 -m benchmarks.prototype_mixer.glue --model "$2=$work/models/$2" --data "$data" --threads 1 \
        --limit "${LIMIT:-10000}" --dev-limit "${DEV_LIMIT:-2000}" --search-limit "${SEARCH_LIMIT:-400}" \
        --work "$work/glue-$1" --out "$work/glue" "${@:3}"
}
for model in $models; do
    glue 0 "$model" --tasks wnli --seeds 0 & # searches first
done
ended
for seed in 0 1 2; do
    for model in $models; do
        place=$work/glue-$seed/$model
        mkdir -p "$place"
        [ -d "$place/search" ] || cp -r "$work/glue-0/$model/search" "$place"
        glue "$seed" "$model" --seeds "$seed" &
    done
done
ended
for model in $models; do
    cp "$work"/glue-[12]/"$model"/runs/*.json "$work/glue-0/$model/runs"
    glue 0 "$model"
done
tar -cf "$out/glue.tar" -C "$work" glue
