"""How the demo's model is taught: question-answer pairs in many wordings, and some plain text.

The loss is of the answers alone, so that no step is spent on predicting what people ask. Several
questions lie in one row behind one system prompt; none sees another.

The first epochs ask in wordings of the document's own question, made from templates. From
``WRITTEN_FROM`` on, two of three ask what a large language model asked of the answer itself
(``demo_questions.jsonl``; it was given ``demo_questions_prompt.md`` and the pairs, nothing else),
so that a model learns which of the documents on a disease says what. From ``ALL_FROM`` on every
question is one of these, and sentences of the plain text are asked about, too
(``demo_plain_pairs.jsonl``, ``demo_plain_pairs_prompt.md``; their answers are the bundled sample's,
under its licences). No question is taught that the finished model is measured with.

From ``ALL_FROM`` on, half of the answers end early, as their first tokens decide which of them it
is, and one in four questions is in lower case throughout.

What ships was taught in three legs, the third by ``--from`` the model of the two before (commit
e878a0d1 says what those were): 50 minutes of two cores at rank 32, with twenty questions to each
answer; the rate was 8e-4 for a third of the time and then fell to zero in a line, and pairs whose
first twelve tokens had lost 0.05 nats each or less were asked half as often. What ships is the
mean of the adapters after and before that leg, seven to three: it answers 90 % of 80 questions for
choosing in the document's words, the leg's end 85 %, and a leg more of the hardest questions 83 %.
A run makes a model that has learned as much, and not the same one. Two prototypes
that the fit of the head left unused were put where most was left unexplained.
"""

from __future__ import annotations

import json
import re
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.shared.options import RESULTS
from prismlm.cli.output import ConsoleReporter
from prismlm.files import read_json
from prismlm.training import LoraOptions
from prismlm.training.fit import Loop
from prismlm.training.tuning import with_adapters, write_adapter

OPTIONS = LoraOptions(rank=32, blocks=2 / 3, length=256, batch=2, learning_rate=1.5e-3, epochs=30)
WRITTEN = Path(__file__).with_name("demo_questions.jsonl")
PLAIN = Path(__file__).with_name("demo_plain_pairs.jsonl")
# What the finished model is asked.
REPORTED = Path(__file__).parents[2] / RESULTS / "asked" / "questions.jsonl"
WRITTEN_FROM, ALL_FROM = 14, 20
# From ALL_FROM on such shares of questions are in lower case, and of answers end after so many
# tokens.
LOWERED, CUT, CUT_AFTER = 0.25, 0.5, (8, 20)
# Plain text is read in every so manieth epoch.
PLAIN_EVERY = 4
IGNORED = -100
# The first epochs know so many of the ways to ask, later ones all.
EARLY_EPOCHS, EARLY_WAYS = 8, 8
# How the documents ask, and other ways; the last is of all that the others are not.
WORDINGS: dict[str, list[str]] = read_json(Path(__file__).with_name("demo_wordings.json"))


def wordings(title: str) -> list[str]:
    """Return a question as the document has it, then in other words, every other in lower case."""
    matched = ((re.fullmatch(p, title), ways) for p, ways in WORDINGS.items())
    topic, ways = next((match[1], ways) for match, ways in matched if match)
    lower = topic if re.search(r"[A-Z]{2}|'s |\d", topic) else topic.lower()
    return [title, *(way.format(t=topic if n % 2 else lower) for n, way in enumerate(ways))]


def subject(title: str) -> str:
    """Return what a document's question is about."""
    topic = next(match[1] for pattern in WORDINGS if (match := re.fullmatch(pattern, title)))
    return topic.removeprefix("the outlook for ").casefold()


def written() -> dict[str, list[str]]:
    """Return the questions that were written to each answer, by the pair's id."""
    return {line["id"]: line["questions"] for line in lines_of(WRITTEN)}


def words(question: str) -> str:
    """Return a question in lower case without its marks: equal questions have equal words."""
    return " ".join(re.findall(r"\w+", question.lower()))


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Lessons:
    """Rows of ``length`` tokens of question-answer pairs and of plain text.

    ``pairs`` are chats of one question and one answer, as ``pairs.parquet`` has them; ``plain`` has
    answers that are sentences of the plain ``texts``, each with questions.
    """

    def __init__(
        self,
        pairs: list[dict[str, Any]],
        plain: list[dict[str, Any]],
        texts: list[str],
        tokenizer: PreTrainedTokenizerFast,
        length: int,
    ) -> None:
        self._length, self._tokenizer = length, tokenizer
        self._reported = {words(one["question"]) for one in lines_of(REPORTED)}
        both = zip(self._chat("A"), self._chat("B"), strict=False)
        self._prefix = [one for one, _ in takewhile(lambda each: each[0] == each[1], both)]
        by_id, asked, answer = written(), self._asked, self._answer
        self._pairs = [
            (
                asked(wordings(one["title"])),
                asked(by_id[one["id"]]),
                answer(one["messages"][1]["content"]),
            )
            for one in pairs
        ]
        self._plain_pairs = [
            (asked(one["questions"]), asked(one["questions"]), answer(one["answer"]))
            for one in plain
        ]
        end = tokenizer.eos_token_id
        self._texts = [
            piece
            for text in texts
            for ids in [[*tokenizer.encode(text, add_special_tokens=False), end]]
            for piece in (ids[at : at + length] for at in range(0, len(ids), length))
            if len(piece) > 16
        ]

    def _asked(self, questions: list[str]) -> list[list[int]]:
        taught = [one for one in questions if words(one) not in self._reported]
        return [self._chat(one)[len(self._prefix) :] for one in taught]

    def _chat(self, question: str) -> list[int]:
        said = [{"role": "user", "content": question}]
        ids = self._tokenizer.apply_chat_template(
            said, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return cast("list[int]", ids)

    def _answer(self, text: str) -> list[int]:
        return self._tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)

    def _lowered(self, asked: list[int]) -> list[int]:
        question, end, rest = str(self._tokenizer.decode(asked)).partition("<|im_end|>")
        return self._tokenizer.encode(question.lower() + end + rest, add_special_tokens=False)

    def epoch(self, number: int, seed: int) -> list[list[tuple[list[int], list[int]]]]:
        """Return the rows of an epoch in random order: each a list of (read, answered) tokens."""
        random = np.random.default_rng([seed, number])
        rows: list[list[tuple[list[int], list[int]]]] = []
        row: list[tuple[list[int], list[int]]] = []
        filled = len(self._prefix)
        pairs = self._pairs + (self._plain_pairs if number >= ALL_FROM else [])
        for index in random.permutation(len(pairs)).tolist():
            in_other_words, of_answer, answer = pairs[index]
            late = number - WRITTEN_FROM
            # Each pair has its own order, so that an epoch has every wording.
            if number >= ALL_FROM:
                asked = of_answer[(index + number) % len(of_answer)]
                if random.random() < LOWERED:
                    asked = self._lowered(asked)
                if random.random() < CUT:
                    answer = answer[: random.integers(*CUT_AFTER, endpoint=True)]
            elif late >= 0 and late % 3 < 2:
                asked = of_answer[(index + late - late // 3) % len(of_answer)]
            else:
                ways = EARLY_WAYS if number < EARLY_EPOCHS else len(in_other_words)
                asked = in_other_words[(index + number) % ways]
            if filled + len(asked) + len(answer) > self._length:
                rows.append(row)
                row, filled = [], len(self._prefix)
            row.append((asked, answer))
            filled += len(asked) + len(answer)
        rows.append(row)
        if number % PLAIN_EVERY == 0:
            rows += [[([], text)] for text in self._texts]
        return [rows[index] for index in random.permutation(len(rows)).tolist()]

    def read(self, row: list[tuple[list[int], list[int]]]) -> int:
        """Return how many tokens of a row are read."""
        shared = len(self._prefix) if row[0][0] else 0
        return shared + sum(len(asked) + len(answer) for asked, answer in row)

    def tensors(
        self, rows: list[list[tuple[list[int], list[int]]]]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens, places and labels [rows, length], and who sees whom [rows, 1, L, L]."""
        shape = (len(rows), self._length)
        ids, places = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, IGNORED)
        # 0 is padding, 1 what all see, and 2 on one pair each.
        part = torch.zeros(shape, dtype=torch.long)
        for at, row in enumerate(rows):
            plain = not row[0][0]
            shared = [] if plain else self._prefix
            start = len(shared)
            ids[at, :start] = torch.tensor(shared, dtype=torch.long)
            places[at, :start] = torch.arange(start)
            part[at, :start] = 1
            for number, (asked, answer) in enumerate(row):
                stop = start + len(asked) + len(answer)
                ids[at, start:stop] = torch.tensor(asked + answer)
                places[at, start:stop] = torch.arange(len(shared), len(shared) + stop - start)
                labels[at, start + len(asked) : stop] = torch.tensor(answer)
                part[at, start:stop] = number + 2
                start = stop
        same = part[:, :, None] == part[:, None, :]
        seen = (same | (part[:, None, :] == 1)).tril()
        return ids, places, labels, seen[:, None]


def summed_loss(model: Any, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the sum of the answers' cross-entropy in nats, and how many tokens it is of."""
    ids, places, labels, seen = batch
    mask = (~seen).bfloat16() * torch.finfo(torch.bfloat16).min
    with torch.autocast("cpu", torch.bfloat16):
        states = model.base_model.model.model(
            input_ids=ids, position_ids=places, attention_mask=mask, use_cache=False
        ).last_hidden_state
        wanted = labels[:, 1:] != IGNORED
        logits = model.base_model.model.lm_head(states[:, :-1][wanted])
    loss = F.cross_entropy(logits.float(), labels[:, 1:][wanted], reduction="sum")
    return loss, int(wanted.sum())


class Teaching(Loop):
    """Adapters that learn lessons; a step's rows are its number, as each epoch has its own."""

    what = "teaching"
    remedy = "give its options a lower learning_rate"

    def __init__(
        self, adapted: Any, lessons: Lessons, options: LoraOptions, first: int = 0
    ) -> None:
        self.learned = [one for one in adapted.parameters() if one.requires_grad]
        numbers = range(first, first + round(options.epochs))
        epochs = [lessons.epoch(number, options.seed) for number in numbers]
        size = options.batch
        self._steps = [
            rows[at : at + size] for rows in epochs for at in range(0, len(rows) - size + 1, size)
        ]
        self._adapted, self._lessons = adapted, lessons
        self.tokens = sum(lessons.read(row) for rows in self._steps for row in rows)
        rate = options.learning_rate
        super().__init__([{"params": self.learned, "lr": rate}], len(self._steps))

    def losses(self, rows: np.ndarray) -> dict[str, float]:
        """Add the gradients of a step; return the answers' cross-entropy in nats a token."""
        loss, count = summed_loss(self._adapted, self._lessons.tensors(self._steps[int(rows[0])]))
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(self.learned, 1.0)
        return {"ce": loss.item() / count, "loss": loss.item() / count}


@torch.no_grad()
def start_as(adapted: Any, former: Path) -> None:
    """Give adapters the updates of others: A below them stays as drawn, B is zero there."""
    saved = load_file(former / SAFETENSORS_WEIGHTS_NAME)
    for name, parameter in adapted.named_parameters():
        if not parameter.requires_grad:
            continue
        matrix = saved[name.replace(".default.", ".")].float()
        if "lora_B" in name:
            parameter.zero_()
        parameter[: matrix.shape[0], : matrix.shape[1]] = matrix


def teach(
    model: PreTrainedModel,
    lessons: Lessons,
    out: Path,
    *,
    base: str,
    options: LoraOptions = OPTIONS,
    former: Path | None = None,
) -> list[dict[str, float]]:
    """Train adapters in a model on lessons, in bfloat16, and write them to ``out``.

    They start as those of the directory ``former``, whose rank is at most theirs, and are then
    taught as from ``ALL_FROM`` on. Returns the mean cross-entropy of the answers, in nats a token,
    every fifty steps.
    """
    adapted = with_adapters(model.bfloat16(), options)
    if former is not None:
        start_as(adapted, former)
    teaching = Teaching(adapted, lessons, options, ALL_FROM if former else 0)
    steps = (np.array([step]) for step in range(teaching.steps))
    teaching.run(steps, "Teaching", "ce", ConsoleReporter())
    note: dict[str, float] = {"tokens": teaching.tokens, "steps": teaching.steps}
    write_adapter(teaching.learned, adapted, base, out, note)
    return teaching.history
