"""What is run on each tree: the quick demo, tiny models of the other families, every command.

Commands stand here as a user would type them, in the words of the tree BEFORE, and relative to a
folder that is empty at first. Each is known by its line, so no two are alike.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Of the demo's documents, for the models that are trained in seconds.
EVERY, CHARACTERS = 8, 1200
AUDITED, AUDITED_CHARACTERS = 6, 400
DOCUMENT = "science_arxiv_abstracts/1309.4625"

SMALL = """
corpus: corpus
seed: 3
data:
  length: 48
optimizer:
  learning_rate: 3e-3
steps: 12
batch_size: 4
precision: float32
device: cpu
evaluation:
  every: 4
  tokens: 600
  final_tokens: 1500
  routing_tokens: 600
  spectra_tokens: 600
checkpoint:
  every: 6
logging:
  every: 2
"""
# Its head and lens go with it, so that other backbones than the demo's are explained too.
PROTOT = """
out: protot
model:
  preset: protot-tiny
  hidden_size: 48
  num_channels: 8
  dropout: 0.1
head:
  prototypes: 64
  prototypes_per_token: 4
  initialise_at_step: 4
  initialise: states
  revive_every: 3
search:
  trials: 2
  startup_trials: 1
  seeds: 1
  sampler: random
  space:
    batch_size: [2, 4]
"""
SIGNAL_NOISE = """
out: signal_noise
model:
  preset: signal-noise-tiny
  hidden_size: 48
  head_size: 12
head:
  enabled: false
noise_weight:
  initial: 0.01
  final: 0.1
"""
GPT2 = """
out: gpt2
model:
  preset: gpt2-laptop
  n_embd: 48
  n_head: 4
  n_layer: 2
  n_positions: 128
head:
  prototypes: 64
  prototypes_per_token: 4
  initialise_at_step: 4
  detach: false
uncertainty:
  enabled: true
  rows: 64
  deviation: 0.3
  passes: 2
"""
DELTANET = """
out: deltanet
model:
  model_type: prismlm_deltanet
  hidden_size: 48
  num_hidden_layers: 2
  num_heads: 2
head:
  enabled: false
uncertainty:
  enabled: true
  levels: 256
"""
RECIPES = {
    "protot.yaml": PROTOT,
    "signal_noise.yaml": SIGNAL_NOISE,
    "gpt2.yaml": GPT2,
    "deltanet.yaml": DELTANET,
}

DEMO = "demo --quick --no-serve --out demo"
PROMPT = '"The court held that"'
SENTENCE = '"The old woman said that she had seen the king"'

COMMANDS = {
    "help": """
        --help
        --version
        demo --help
        train --help
        index --help
        explain --help
        audit --help
        sources --help
        compare --help
        steer --help
        generate --help
        corpus --help
        corpus build --help
        corpus info --help
        inspect --help
        inspect attention --help
        inspect channels --help
        inspect interventions --help
        inspect heads --help
        inspect spectra --help
        inspect uncertainty --help
        inspect index --help
    """,
    "corpus": """
        corpus build texts.jsonl --out corpus --tokenizer demo/model --heldout 0.2 --json
        corpus build audited.jsonl --out tiny_corpus --vocab-size 400
        corpus info corpus
        corpus info demo/corpus --json
    """,
    "train": """
        train protot.yaml
        train signal_noise.yaml --json
        train gpt2.yaml
        train gpt2.yaml --set out=resumed --set steps=6 --set checkpoint.every=3 --json
        train gpt2.yaml --set out=resumed --set steps=6 --set checkpoint.every=3 --resume
        train gpt2.yaml --set out=shuffled --set uncertainty.signal=shuffled --set steps=5
        train deltanet.yaml --set steps=4 --set gradient_accumulation=2 --set data.packing=padded
        train signal_noise.yaml --set out=experts --set model.mlp=experts --set steps=4
        train signal_noise.yaml --set out=sparse --set model.mlp=sparse_coding --set steps=4
        train protot.yaml --set out=grouped --set model.num_groups=2 --set model.decay_mode=token
            --set steps=6 --set dropout=0 --set head.detach=false
        train protot.yaml --set out=searched --set steps=5 --search
    """,
    "index": """
        index protot --corpus corpus --lens texts --contexts 8
        index gpt2 --corpus corpus --lens small --contexts 4 --no-text --json
        index protot --dataset json --data-files texts.jsonl --lens streamed --contexts 4
        inspect index demo/model
        inspect index protot --lens texts --json
    """,
    "explain": f"""
        explain demo/model {PROMPT}
        explain demo/model {PROMPT} --generate 8
        explain demo/model {PROMPT} --by document --documents 3
        explain demo/model {PROMPT} --by document --json
        explain demo/model {PROMPT} --method source
        explain demo/model {PROMPT} --method source --json
        explain demo/model {PROMPT} --where domain=law --top 2 --tokens last
        explain demo/model {SENTENCE} --generate 4 --temperature 0.7 --seed 2 --attention 1:2 --json
        explain demo/model {SENTENCE} --html explain.html --parquet explain.parquet
        explain demo/model --file prompts.txt --lines --json
        explain protot {PROMPT} --lens texts --generate 4
        explain gpt2 {PROMPT} --json
        generate demo/model {PROMPT} --tokens 16
        generate demo/model {PROMPT} --tokens 16 --temperature 0.8 --seed 5 --json
        generate gpt2 {PROMPT} --tokens 8 --json
    """,
    "audit": f"""
        audit demo/model audited.jsonl --parquet audit.parquet --jsonl audit.jsonl --csv audit.csv
        audit demo/model audited.jsonl --html audit.html --by source --json
        audit demo/model audited.jsonl --method source --window 32 --documents 3
        sources demo/model --doc {DOCUMENT}
        sources demo/model --doc {DOCUMENT} --audit audit.parquet --json
        sources demo/model --doc {DOCUMENT} --file audited.jsonl --top 4
    """,
    "compare": """
        compare demo/model demo/model/checkpoints/checkpoint-750 --file audited.jsonl
        compare demo/model demo/model --file audited.jsonl --by source --parquet pairs.parquet
        compare demo/model protot --lens-b texts --file audited.jsonl --window 32 --json
    """,
    "steer": f"""
        steer demo/model {PROMPT} --prototype 105 --strength 0.8 --generate 6 --heldout 500
        steer demo/model {PROMPT} --prototype 105 --edit scale --strength 2 --heldout 500 --json
        steer demo/model {PROMPT} --prototype 496 --edit ablate --generate 5 --heldout 500
        steer demo/model {PROMPT} --document {DOCUMENT} --strength -1 --generate 4 --heldout 0
        steer demo/model {PROMPT} --only prototypes --generate 5 --heldout 0 --json
        steer demo/model --prototype 105 --strength 0.8 --file prompts.txt --draws 2 --heldout 0
    """,
    "channels": f"""
        inspect channels protot --max-tokens 3000 --top 3 --out plots --html channels.html
        inspect channels protot --max-tokens 2000 --text {SENTENCE} --beside demo/model --json
        inspect channels protot --max-tokens 2000 --layer 1 --channel 2
        inspect channels demo/model --max-tokens 2000
        inspect interventions protot --cases cases.jsonl --channel 1:2 --minimum 1e-6
        inspect interventions protot --cases cases.jsonl --find --corpus corpus --max-tokens 3000
            --minimum 1e-6 --controls 2 --by points --out interventions --json
    """,
    "heads": f"""
        inspect heads signal_noise --tokens 2000
        inspect heads signal_noise demo/model --tokens 2000 --out by_head.csv --json
        inspect attention signal_noise {SENTENCE}
        inspect attention demo/model {SENTENCE} --layer 1 --top 2 --out attention.png --json
        inspect attention signal_noise --roles --layer 1 --group signal
        inspect attention demo/model --roles --layer 1 --draws 300 --no-untrained --json
        inspect spectra signal_noise --tokens 2000 --positions 256 --documents 4
        inspect spectra signal_noise --tokens 2000 --positions 256 --documents 4 --json
        inspect spectra demo/model --loss-only --tokens 1000 --documents 4
    """,
    "uncertainty": """
        inspect uncertainty gpt2 --texts 10 --tokens 32 --permutations 2 --write 10 --steps 3
        inspect uncertainty gpt2 --texts 10 --tokens 32 --permutations 2 --write 10 --steps 3 --json
        inspect uncertainty shuffled --check ablation --check probe --signal recursion --texts 8
            --tokens 24 --permutations 2
    """,
    "estimates": """
        demo --quick --out demo --dry-run
        train gpt2.yaml --set out=estimated --dry-run --json
        corpus build texts.jsonl --out estimated_corpus --dry-run --json
        index protot --corpus corpus --lens estimated --dry-run --json
        audit demo/model audited.jsonl --dry-run --json
        inspect uncertainty gpt2 --texts 10 --tokens 32 --check ablation --dry-run --json
    """,
    "refusals": f"""
        explain missing {PROMPT}
        explain demo/model {PROMPT} --by kind
        train gpt2.yaml --set unknown=1
        train gpt2.yaml --set uncertainty.passes=0
        train gpt2.yaml --set seed=4
        inspect heads protot
        inspect interventions protot --cases woman --channel 0:0
        inspect interventions demo/model --cases cases.jsonl --channel 0:0
        inspect uncertainty protot
        inspect spectra protot
        inspect nothing
        corpus info demo/model
    """,
    "demo": "demo --quick --no-serve --out ./demo",
}


class Step(NamedTuple):
    """One command line.

    Attributes:
        group: what it is counted under.
        line: what it is known by, in the words of the tree BEFORE.
        arguments: what is run.
    """

    group: str
    line: str
    arguments: list[str]


def first_step() -> Step:
    """Return what everything else is read from: the demo, from nothing."""
    return Step("demo", DEMO, shlex.split(DEMO))


def steps(rename: Callable[[list[str]], list[str]]) -> list[Step]:
    """Return all steps but the first.

    Args:
        rename: says arguments in the words of a tree.
    """
    lines = [
        (group, line.strip())
        for group, text in COMMANDS.items()
        for line in text.replace("\n            --", " --").splitlines()
        if line.strip()
    ]
    return [Step(group, line, rename(shlex.split(line))) for group, line in lines]


def write_inputs(folder: Path, rename: Callable[[str], str]) -> None:
    """Write recipes and texts; texts are documents that the demo left in the folder.

    Args:
        folder: of the run.
        rename: says a recipe in the words of a tree.
    """
    import pyarrow.parquet as pq

    for name, own in RECIPES.items():
        (folder / name).write_text(rename(own.lstrip() + SMALL.lstrip()), encoding="utf-8")
    rows: list[dict[str, Any]] = pq.read_table(folder / "demo" / "documents.parquet").to_pylist()
    texts = [row | {"text": row["text"][:CHARACTERS]} for row in rows[::EVERY]]
    audited = [
        row | {"text": row["text"][:AUDITED_CHARACTERS]}
        for row in rows[:: len(rows) // AUDITED][:AUDITED]
    ]
    _write_lines(folder / "texts.jsonl", texts)
    _write_lines(folder / "audited.jsonl", audited)
    contexts = ("She went to the river with", "He read a book about", "They lived in a house near")
    _write_lines(
        folder / "cases.jsonl",
        [
            {"concept": target, "context": context, "target": target}
            for context in contexts
            for target in ("the", "a")
        ],
    )
    (folder / "prompts.txt").write_text(
        "Once upon a time\nThe applicant submitted\n", encoding="utf-8"
    )


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
