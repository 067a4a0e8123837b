"""The second leg of teaching the demo's model: the same answers to questions in other words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import PreTrainedModel

from prismlm.cli.progress import ConsoleReporter
from prismlm.corpus import Corpus, build_corpus
from prismlm.corpus.packing import pack
from prismlm.demo.texts import pairs_path, plain_texts
from prismlm.files import read_json
from prismlm.models.checkpoint import read_checkpoint
from prismlm.training import LoraOptions
from prismlm.training.loop import batches
from prismlm.training.lora import NOTE_FILE, Adapting, adapt, with_adapters, write_adapter

OPTIONS = LoraOptions(
    rank=8, blocks=2 / 3, batch=4, length=256, learning_rate=2e-3, epochs=1, seed=1
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


def in_two_legs(
    model: PreTrainedModel,
    corpus: Corpus,
    options: LoraOptions,
    saved: Path,
    out: Path,
    **how: Any,
) -> list[dict[str, float]]:
    """Train adapters as :func:`adapt` does, then on with the wordings; texts are read twice more.

    What is of the first leg lies beside ``saved``, in ``first-leg``.
    """
    work, base = saved.parent, saved.parent / "base"
    first = work / "first-leg"
    history = [] if first.exists() else adapt(model, corpus, options, saved, first, **how)
    taught = build_corpus(_lessons(corpus, work), work / "second-leg", tokenizer=base)
    opened = read_checkpoint(base)[0].bfloat16()
    adapted = with_adapters(opened, OPTIONS)
    before = load_file(first / "adapter_model.safetensors")
    set_peft_model_state_dict(adapted, {name: value.float() for name, value in before.items()})
    rows = pack(taught, taught.split("train"), OPTIONS.length or 0, OPTIONS.seed)
    identity = {"model": "second leg", "corpus": taught.fingerprint}
    training = Adapting(adapted, opened, rows, OPTIONS, work / "second-leg.pt", identity, bf16=True)
    training.resume()
    chosen = batches(len(rows), OPTIONS.batch, training.step, training.steps, OPTIONS.seed)
    training.run(chosen, "Fine-tuning", "ce", progress=ConsoleReporter())
    note = read_json(first / NOTE_FILE) | {"second_leg_tokens": rows.num_tokens}
    write_adapter(training, adapted, how["base"], out, note)
    return [*history, *training.history]


def _lessons(corpus: Corpus, work: Path) -> list[Path]:
    """Write every pair in other words, and the other texts twice; return the files."""
    chats: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for pair in pq.read_table(pairs_path()).to_pylist():
        chats += in_other_words(pair) if pair["split"] == "train" else []
    for row in pq.read_table(plain_texts(work / "plain.parquet")).to_pylist():
        texts += [{**row, "id": f"{row['id']}/{time}"} for time in range(2)]
    lines, twice = work / "chats.jsonl", work / "texts.parquet"
    lines.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(texts), twice)
    return [lines, twice]
