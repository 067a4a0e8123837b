"""What a removal of documents is estimated to change, against training again without them.

    python -m benchmarks.control.what_if bank SMOLLM2.gguf WORK

``bank`` teaches SmolLM2 some question-answer pairs of MedQuAD through adapters in its last third of
blocks, once with all of them, twice with other seeds, and once without each of many sets: four
partitions into tenths, and whole sources. Of every model it keeps what each question's answer is
given, token by token. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import copy
import gc
import re
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.attach.demo_lessons import IGNORED, REPORTED, Lessons, lines_of, words
from benchmarks.shared.options import script_options
from prismlm.demo.texts import pairs_path
from prismlm.files import write_json
from prismlm.models.base import find_base, put_base
from prismlm.models.checkpoint import read_checkpoint
from prismlm.training.fit import Loop
from prismlm.training.tuning import LoraOptions, with_adapters

OPTIONS = LoraOptions(rank=8, blocks=1 / 3, length=256, batch=2, learning_rate=2e-3, epochs=6)
DOCUMENTS, LIKE_ANOTHER, PARTITIONS, TENTHS, SEED = 120, 45, 4, 10, 0
# Of the answers, those of at most so many words.
LONGEST = 24
# Words that two answers share, of all that they have, from which on one says much of the other.
ALIKE = 0.5
# A source is left out as a whole if it has so many documents.
SMALLEST, LARGEST = 5, 40
Row = list[tuple[list[int], list[int]]]


class Answers(NamedTuple):
    """What a model gives the tokens of all answers, one after another: [tokens] each."""

    log_probability: np.ndarray
    top: np.ndarray  # its likeliest token


def chosen_pairs() -> list[dict[str, Any]]:
    """Return the pairs that are taught: many whose answer another says too, and whole topics."""
    reported = {words(one["question"]) for one in lines_of(REPORTED)}
    rows = [row for row in pq.read_table(pairs_path()).to_pylist() if row["split"] == "train"]
    rows = [row for row in rows if words(row["title"]) not in reported]
    rows = [row for row in rows if len(row["messages"][1]["content"].split()) <= LONGEST]
    said = [set(re.findall(r"\w+", row["messages"][1]["content"].lower())) for row in rows]
    order = np.random.default_rng(SEED).permutation(len(rows)).tolist()
    chosen: dict[int, None] = {}
    for first in order:
        alike = [
            n for n in order if len(said[n] & said[first]) > ALIKE * len(said[n] | said[first])
        ]
        if len(alike) > 1 and len(chosen) < LIKE_ANOTHER:
            chosen |= dict.fromkeys(alike)
    for first in order:
        topic = rows[first]["id"].split("#")[0]
        together = [n for n, row in enumerate(rows) if row["id"].split("#")[0] == topic]
        if len(chosen) < DOCUMENTS:
            chosen |= dict.fromkeys(together)
    return [rows[number] for number in list(chosen)[:DOCUMENTS]]


def left_out_sets(pairs: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Return the documents that each model goes without, by the model's name."""
    sets: dict[str, list[int]] = {"full": [], "seed-1": [], "seed-2": []}
    for source, count in Counter(pair["source"] for pair in pairs).items():
        if SMALLEST <= count <= LARGEST:
            members = [n for n, pair in enumerate(pairs) if pair["source"] == source]
            sets[source.replace("/", "-")] = members
    for partition in range(PARTITIONS):
        order = np.random.default_rng([SEED, partition]).permutation(len(pairs))
        for number, part in enumerate(np.array_split(order, TENTHS)):
            sets[f"tenth-{partition}-{number}"] = np.sort(part).tolist()
    return sets


class Documents(Lessons):
    """The pairs as rows, read through the upper blocks alone: those below are never trained."""

    def __init__(self, pairs: list[dict[str, Any]], model: PreTrainedModel, tokenizer: Any) -> None:
        super().__init__(pairs, [], [], tokenizer, OPTIONS.length or 0)
        blocks: Any = model.get_submodule("model.layers")
        self._cut = len(blocks) - max(1, round(OPTIONS.blocks * len(blocks)))
        self._model, self._below = model, dict[tuple[int, ...], Tensor]()

    @cached_property
    def asked(self) -> list[tuple[list[int], list[int]]]:
        """Every document's own question, then one in other words of each, with the answers."""
        own = [(titles[0], answer) for titles, _, answer in self._pairs]
        return own + [(of_answer[0], answer) for _, of_answer, answer in self._pairs]

    def alone(self, number: int) -> tuple[list[int], list[int]]:
        """Return the tokens before an answer of ``asked``, and those of the answer."""
        asked, answer = self.asked[number]
        return [*self._prefix, *asked], answer

    def rows(self, order: list[int], left_out: Collection[int] = ()) -> list[Row]:
        """Return numbers of ``asked`` as rows; what is left out leaves its place empty."""
        rows, filled = [[]], len(self._prefix)
        for number in order:
            size = sum(map(len, self.asked[number]))
            if filled + size > self._length:
                rows.append([])
                filled = len(self._prefix)
            rows[-1] += [] if number in left_out else [self.asked[number]]
            filled += size
        return rows

    def batches(self, left_out: set[int], seed: int) -> list[list[Row]]:
        """Return the rows of every step: two models of one seed differ in documents alone."""
        random, size, steps = np.random.default_rng([seed, 1]), OPTIONS.batch, list[list[Row]]()
        for _ in range(round(OPTIONS.epochs)):
            rows = self.rows(random.permutation(len(self._pairs)).tolist(), left_out)
            steps += [rows[at : at + size] for at in range(0, len(rows), size)]
        return [kept for rows in steps if (kept := [row for row in rows if row])]

    @torch.no_grad()
    def states(self, row: Row) -> Tensor:
        """Return the states below the trained blocks, computed once: [tokens, d]."""
        parts: list[Tensor] = []
        for asked, answer in row:
            ids = (*self._prefix, *asked, *answer)
            if ids not in self._below:
                with torch.autocast("cpu", torch.bfloat16):
                    output = self._model(torch.tensor([ids]), output_hidden_states=True)
                self._below[ids] = output.hidden_states[self._cut][0]
            parts.append(self._below[ids][0 if not parts else len(self._prefix) :])
        return torch.cat(parts)

    def logits(self, adapted: Any, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """Return the logits of the answers' tokens, float32 [n, V], and these tokens [n]."""
        _, places, labels, seen = self.tensors(rows)
        states = [self.states(row) for row in rows]
        longest = max(map(len, states))
        places, labels, seen = (
            places[:, :longest],
            labels[:, :longest],
            seen[..., :longest, :longest],
        )
        mask = torch.zeros(seen.shape, dtype=torch.bfloat16)
        mask.masked_fill_(~seen, torch.finfo(torch.bfloat16).min)
        z, decoder = torch.nn.utils.rnn.pad_sequence(states, batch_first=True), adapted.model
        with torch.autocast("cpu", torch.bfloat16):
            turned = decoder.model.rotary_emb(z, places)
            for block in decoder.model.layers[self._cut :]:
                z = block(z, attention_mask=mask, position_embeddings=turned, position_ids=places)
            wanted = labels[:, 1:] != IGNORED
            logits = decoder.lm_head(decoder.model.norm(z[:, :-1][wanted]))
        return logits.float(), labels[:, 1:][wanted]

    @torch.no_grad()
    def answers(self, adapted: Any) -> Answers:
        """Return what a model gives all answers."""
        found: list[Tensor] = []
        for row in self.rows(list(range(len(self.asked)))):
            logits, tokens = self.logits(adapted, [row])
            given = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            found.append(torch.stack([given, logits.argmax(-1)]))
        given, top = torch.cat(found, 1)
        return Answers(given.numpy(), top.int().numpy())


class Teaching(Loop):
    """Adapters that learn the documents; a step's rows are its number."""

    what, remedy = "teaching", "give its options a lower learning_rate"

    def __init__(
        self, documents: Documents, model: PreTrainedModel, left_out: set[int], seed: int
    ) -> None:
        self.adapted = with_adapters(copy.deepcopy(model), replace(OPTIONS, seed=seed))
        self.learned = [one for one in self.adapted.parameters() if one.requires_grad]
        self._documents, self._batches = documents, documents.batches(left_out, seed)
        super().__init__(
            [{"params": self.learned, "lr": OPTIONS.learning_rate}], len(self._batches)
        )

    def losses(self, rows: np.ndarray) -> dict[str, float]:
        """Add the gradients of a step; return the answers' cross-entropy in nats a token."""
        logits, tokens = self._documents.logits(self.adapted, self._batches[int(rows[0])])
        loss = torch.nn.functional.cross_entropy(logits, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.learned, 1.0)
        return {"ce": loss.item(), "loss": loss.item()}

    def taught(self) -> Any:
        """Take all steps; return the model with its adapters."""
        for step in range(self.steps):
            self.take(np.array([step]))
        return self.adapted


def opened(gguf: str, work: Path) -> tuple[list[dict[str, Any]], PreTrainedModel, Documents]:
    """Return the pairs, SmolLM2 and the pairs as rows."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "documents.parquet").exists():
        pq.write_table(pa.Table.from_pylist(chosen_pairs()), work / "documents.parquet")
        put_base(find_base(gguf), work / "smollm2")
    pairs = pq.read_table(work / "documents.parquet").to_pylist()
    model, tokenizer = read_checkpoint(work / "smollm2", device="cpu")
    model = model.bfloat16().requires_grad_(False)
    return pairs, model, Documents(pairs, model, tokenizer)


def bank(gguf: str, work: Path) -> None:
    """Teach what is missing, and keep what each model gives the answers."""
    pairs, model, documents = opened(gguf, work)
    sets = left_out_sets(pairs)
    write_json(work / "sets.json", sets)
    sizes = [len(answer) for _, answer in documents.asked]
    np.save(work / "sizes.npy", np.array(sizes))
    if not (work / "base.npz").exists():
        untaught = with_adapters(copy.deepcopy(model), OPTIONS)
        np.savez(work / "base.npz", **documents.answers(untaught)._asdict())
    for name, left_out in sets.items():
        if not (work / f"{name}.npz").exists():
            begun = time.monotonic()
            seed = int(name[5:]) if name.startswith("seed") else SEED
            teaching = Teaching(documents, model, set(left_out), seed)
            given = documents.answers(teaching.taught())
            # PEFT's models refer to themselves.
            del teaching
            gc.collect()
            np.savez(work / f"{name}.npz", **given._asdict())
            print(name, f"{given.log_probability.mean():.4f}", flush=True)
            print(f"{time.monotonic() - begun:.0f} s", time.strftime("%T"), flush=True)


def main() -> None:
    """Run one part."""
    parser = script_options(__doc__)
    parser.add_argument("part", choices=("bank",))
    parser.add_argument("gguf")
    parser.add_argument("work", type=Path)
    args = parser.parse_args()
    {"bank": bank}[args.part](args.gguf, args.work)


if __name__ == "__main__":
    main()
