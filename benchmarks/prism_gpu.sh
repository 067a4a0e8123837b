#!/usr/bin/env bash
# Trains GPT-2 small three ways on 100.7 M tokens, within nine minutes of one GPU a call.
#
#   bash benchmarks/prism_gpu.sh OUT_DIR CORPUS [default|source|plain …] [--tiny]
#
# Recipes: recipes/gpt2-small-gpu/100m-*.yaml. All three if none is named, in turn, as far as LIMIT
# seconds go (510): name one a call. Writes OUT_DIR/prism_gpu.json, anew after each, and prism_gpu.log;
# with RECIPES and RESULT other recipes and another file, such as those of recipes/gpt2-10m/.
# A run that is cut leaves a checkpoint in WORK (OUT_DIR/work), and the next call with the same WORK goes
# on from there; where nothing but small files survives a call, a run has to end in one. Models trained
# before stay in the JSON: a call begins with docs/results/prism_gpu.json if there is one, so copy each
# result there, then `python -m benchmarks.render prototype_head`.
#
# Needs torch, transformers and what `pip install -e '.[train]'` brings; src is on the path. GIT_COMMIT
# names the commit where the history is not at hand. --tiny tries everything on a CPU.
#
# CORPUS is a corpus directory, or one packed for a slow line. About 30 M tokens, of which 1 % are held
# out, from Parquet files with a column `text`; holes take the place of the texts, which training does
# not read. A token of the bundled sample then takes 1.2 bytes: 30 M, read 3.4 times, are 35 MB.
#
#   prismlm corpus build TEXTS_DIR --out corpus-gpu --tokenizer gpt2 --heldout 0.01
#   cp -r corpus-gpu bare && for f in bare/text-*; do n=$(stat -c %s $f); rm $f; truncate -s $n $f; done
#   tar -C bare -cSf - . | xz -9e -T0 >corpus-gpu.tar.xz
set -euo pipefail
out=$(realpath -m "${1:?name the folder to write to}")
corpus=$(realpath -e "${2:?name the corpus, a directory or a .tar.xz}")
shift 2
cd "$(dirname "$0")/.."
export GIT_COMMIT=${GIT_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || true)}
: "${GIT_COMMIT:?name the commit that is run: GIT_COMMIT=… bash benchmarks/prism_gpu.sh}"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
names=() changes=() work=${WORK:-$out/work} limit=${LIMIT:-510}
recipes=${RECIPES:-recipes/gpt2-small-gpu/100m} result=${RESULT:-prism_gpu.json}
for word; do
    if [ "$word" = --tiny ]; then
        changes=(model.n_embd=32 model.n_layer=2 model.n_head=2 data.length=32 batch_size=4 steps=12
            precision=float32 device=cpu compile=false evaluation.every=4 evaluation.tokens=500
            evaluation.final_tokens=500 checkpoint.every=4 logging.every=4 head.prototypes=64)
        changes=("${changes[@]/#/--set=}")
    else
        names+=("$word")
    fi
done
[ ${#names[@]} -gt 0 ] || names=(default source plain)
mkdir -p "$out" "$work"
[ -e "$out/$result" ] || cp "docs/results/$result" "$out" 2>/dev/null || true
if [ -f "$corpus" ]; then
    [ -d "$work/corpus" ] || { mkdir "$work/corpus.new" && tar -C "$work/corpus.new" -xf "$corpus"; }
    [ -d "$work/corpus" ] || mv "$work/corpus.new" "$work/corpus"
    corpus=$work/corpus
fi
status=0
for name in "${names[@]}"; do
    model=$work/$name left=$((limit - SECONDS)) began=$SECONDS code=0
    [ "$left" -gt 0 ] || { echo "$name: no time left, call again" && status=1 && continue; }
    grep -qs final_ce "$model/training.jsonl" ||
        timeout -k 25 "$left" python3 -m prismlm train "$recipes-$name.yaml" --resume \
            "--set=corpus=$corpus" "--set=out=$model" "${changes[@]}" >>"$out/prism_gpu.log" 2>&1 \
            </dev/null || code=$?
    [ ! -e "$model/training.jsonl" ] ||
        python3 -m benchmarks.prototype_head.gpu_curves "$out/$result" "$name" "$model" $((SECONDS - began))
    case $code in
    0) echo "$name: done" ;;
    124 | 130 | 137 | 143) status=1 && echo "$name: cut, call again" ;;
    *) status=1 && echo "$name: failed: $(tail -n 1 "$out/prism_gpu.log")" ;;
    esac
done
exit $status
