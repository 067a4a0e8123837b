"""Judge what models write after held-out text, and the judge before them.

    python -m benchmarks.prototype_mixer.judge --corpus DIR --judge DIR --called NAME --work DIR
    python -m benchmarks.prototype_mixer.judge PROTOT LLAMA MAMBA2 DELTANET --corpus DIR \\
        --judge DIR --called NAME --work DIR
    python -m benchmarks.prototype_mixer.render_judge

Without models, the judge alone is examined; ``--by likelihood`` and ``--by typical`` do not ask it.
Without a judge, BLEU alone is measured. ``--endpoint URL --endpoint-model MODEL`` asks a language
model in place of ``--judge DIR``. Each run writes
``NAME.json`` into ``judge/``; what it made is kept in the work directory, from which one that was
stopped goes on.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus
from prismlm.eval.judging.continuations import Writing, corpus_prompts
from prismlm.eval.judging.judges import WAYS, judge_opener
from prismlm.eval.judging.study import Study, named, run_judging
from prismlm.files import write_json


def main() -> None:
    """Run one study and note it."""
    parser = script_options(__doc__, RESULTS / "prototype_mixer" / "judge")
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--by", choices=WAYS, default="asked", help="how --judge judges")
    parser.add_argument("--endpoint")
    parser.add_argument("--endpoint-model")
    parser.add_argument("--called", required=True, help="the judge's name, and the result's")
    parser.add_argument("--text", default="held-out text", help="what it is, for the page")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--words", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    open_judge = judge_opener(given.judge, given.endpoint, given.endpoint_model, by=given.by)
    corpus, how = Corpus.open(given.corpus), Writing(words=given.words, seed=given.seed)
    prompts = corpus_prompts(corpus, given.prompts, how)
    found = run_judging(Study(named(given.models), prompts, how, given.work, open_judge))
    told = {"called": given.called, "text": given.text, "environment": environment()}
    write_json(given.out / f"{given.called}.json", told | found)
    print(f"wrote {given.out / given.called}.json")


if __name__ == "__main__":
    main()
