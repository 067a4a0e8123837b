"""A model that was taught question-answer pairs, with a head and a lens: what is asked about it.

    python -m benchmarks.attach.taught_model --work DIR

fetches SmolLM2-135M-Instruct and fine-tunes it on the pairs and some of the bundled sample in
legs: first on the documents as they are, then on the same answers to questions in other words, so
that it learns the facts and not the wording. Then a head is attached. Stopped, it goes on where it
was; two CPU cores take two hours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import PreTrainedModel

from benchmarks.attach.taught_texts import PAIRS, plain_texts
from prismlm.cli.progress import ConsoleReporter
from prismlm.corpus import Corpus, build_corpus
from prismlm.corpus.packing import pack
from prismlm.demo.fetch import fetch
from prismlm.files import read_json
from prismlm.models.checkpoint import read_checkpoint
from prismlm.training import AttachOptions, FitOptions, LoraOptions, attach
from prismlm.training.loop import batches
from prismlm.training.lora import NOTE_FILE, Adapting, adapt, with_adapters, write_adapter

FIRST = LoraOptions(blocks=2 / 3, length=256, batch=4, learning_rate=1e-3, epochs=5)
# One leg each: the pairs in five other wordings.
LATER = (LoraOptions(blocks=2 / 3, length=256, batch=4, learning_rate=2e-3, epochs=1, seed=1),)
OPTIONS = AttachOptions(
    fit=FitOptions(prototypes=2048, prototypes_per_token=16, epochs=4.0, weights="fitted"),
    window=512,
    contexts=4,
    codes="pq12",
    heldout_tokens=15_000,
    keep_states=True,
    lora=FIRST,
)
# How the documents ask, and five other ways; the last is of all that the others are not.
WORDINGS: dict[str, tuple[str, ...]] = {
    r"What is the outlook for (.*)\?": (
        "What can people with {t} expect?",
        "How does {t} usually go on over the years?",
        "Does {t} get better?",
        "What does the future hold with {t}?",
        "How serious is {t} in the long run?",
    ),
    r"What causes (.*)\?": (
        "Why does somebody get {t}?",
        "What brings on {t}?",
        "What is behind {t}?",
        "How does {t} start?",
        "What leads to {t}?",
    ),
    r"What are the symptoms of (.*)\?": (
        "What are the signs of {t}?",
        "What does {t} feel like?",
        "How does {t} show itself?",
        "What happens to people who have {t}?",
        "How can I recognise {t}?",
    ),
    r"What are the treatments for (.*)\?": (
        "How is {t} treated?",
        "What helps against {t}?",
        "Which therapy is there for {t}?",
        "Can anything be done about {t}?",
        "What do people take or do for {t}?",
    ),
    r"Who is at risk for (.*)\?": (
        "Who gets {t}?",
        "Who is most affected by {t}?",
        "Could I get {t}?",
        "What makes {t} more likely?",
        "Whom does {t} strike?",
    ),
    r"How to prevent (.*)\?": (
        "How can I avoid {t}?",
        "What protects against {t}?",
        "Can {t} be prevented?",
        "What lowers the chance of {t}?",
        "How do I stay clear of {t}?",
    ),
    r"How to diagnose (.*)\?": (
        "Which tests show {t}?",
        "How is {t} diagnosed?",
        "How is {t} found?",
        "What does a doctor look at to detect {t}?",
        "How can you tell whether it is {t}?",
    ),
    r"What are the complications of (.*)\?": (
        "What can {t} lead to?",
        "What can go wrong with {t}?",
        "Which problems come with {t}?",
        "What happens if {t} is not treated?",
        "What does {t} do to the body?",
    ),
    r"What (?:is|are) (.*)\?": (
        "Tell me about {t}.",
        "Explain {t}.",
        "What does {t} mean?",
        "I have heard of {t}. What is it?",
        "What should I know about {t}?",
    ),
}


def in_other_words(pair: dict[str, Any]) -> list[dict[str, Any]]:
    """Return five chats with the answer of a pair; every other one has its topic in lower case."""
    matched = ((re.fullmatch(p, pair["title"]), ways) for p, ways in WORDINGS.items())
    topic, ways = next((found[1], ways) for found, ways in matched if found)
    lower = topic if re.search(r"[A-Z]{2}|'s ", topic) else topic.lower()
    answer = pair["messages"][1]
    return [
        {
            "id": f"{pair['id']}/{number}",
            "split": "train",
            "messages": [
                {"role": "user", "content": way.format(t=lower if number % 2 else topic)},
                answer,
            ],
        }
        for number, way in enumerate(ways)
    ]


def main() -> None:
    """Teach, and attach a head."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--work", type=Path, required=True, help="where everything is built")
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    # Names that are noted are then without a path.
    os.chdir(work)
    gguf = fetch(Path(), progress=ConsoleReporter())
    shutil.copyfile(PAIRS, "pairs.parquet")
    texts = [Path("pairs.parquet"), plain_texts(Path("plain.parquet"))]
    # The later legs come between the first and the head; attach has no name for that.
    sys.modules[attach.__module__].adapt = in_legs  # pyright: ignore[reportAttributeAccessIssue]
    print(attach(str(gguf), texts, Path("model"), OPTIONS, progress=ConsoleReporter()).quality)


def in_legs(
    model: PreTrainedModel,
    corpus: Corpus,
    options: LoraOptions,
    saved: Path,
    out: Path,
    **how: Any,
) -> list[dict[str, float]]:
    """Train adapters as :func:`adapt` does, then on with other wordings, a leg after the other.

    What a leg ends with lies beside ``saved``, in ``leg-0`` and so on.
    """
    work, base = saved.parent, saved.parent / "base"
    last = work / "leg-0"
    history = [] if last.exists() else adapt(model, corpus, options, saved, last, **how)
    taught = build_corpus(_lessons(work), work / "lessons", tokenizer=base)
    for number, later in enumerate(LATER, 1):
        opened = read_checkpoint(base)[0].bfloat16()
        adapted = with_adapters(opened, later)
        before = load_file(last / "adapter_model.safetensors")
        set_peft_model_state_dict(adapted, {name: one.float() for name, one in before.items()})
        rows = pack(taught, taught.split("train"), later.length or 0, later.seed)
        identity = {"model": f"leg {number}", "corpus": taught.fingerprint}
        saved = work / f"leg-{number}.pt"
        training = Adapting(adapted, opened, rows, later, saved, identity, bf16=True)
        training.resume()
        chosen = batches(len(rows), later.batch, training.step, training.steps, later.seed)
        training.run(chosen, f"Leg {number}", "ce", progress=ConsoleReporter())
        note = read_json(last / NOTE_FILE)
        note = {**note, "tokens": note["tokens"] + rows.num_tokens, "legs": number + 1}
        done = number == len(LATER)
        last = out if done else work / f"leg-{number}"
        write_adapter(training, adapted, how["base"], last, note)
        history += training.history
    return history


def _lessons(work: Path) -> list[Path]:
    """Write every pair in other words, and the other texts twice; return the files."""
    chats: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for pair in pq.read_table(PAIRS).to_pylist():
        chats += in_other_words(pair) if pair["split"] == "train" else []
    for row in pq.read_table(plain_texts(work / "plain.parquet")).to_pylist():
        texts += [{**row, "id": f"{row['id']}/{time}"} for time in range(2)]
    lines, twice = work / "chats.jsonl", work / "texts.parquet"
    lines.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(texts), twice)
    return [lines, twice]


if __name__ == "__main__":
    main()
