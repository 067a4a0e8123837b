"""Write texts under edits, and their controls, for a blind reader: docs/results/edits.json.

    prismlm demo --no-serve --out prismlm-demo
    python -m benchmarks.edits.measure prismlm-demo/model

Ten prototypes and ten categories are taken by rule. What a reader is given, edits_texts.jsonl,
says of each text nothing but an id; reading_prompt.md is how it is asked, and edits_answers.jsonl,
beside the others, what it answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import prismlm
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus.chat import Messages, as_chat
from prismlm.files import read_json, write_json
from prismlm.interventions.plan import plan_for
from prismlm.interventions.steering import (
    MAX_REPETITION,
    MAX_STRENGTH,
    STRENGTH_STEPS,
    SteeredPredictions,
    evidence_share,
    repetition,
    steered_predictions,
    strongest,
)
from prismlm.interventions.values import Clamp, Group
from prismlm.lens.lens import Lens
from prismlm.lens.signatures import different_words

PROTOTYPES, CATEGORIES = 10, 10
CHOICES, LETTERS, LIKE = 4, 4, 50
# A token of a category: so many times as often there as in all cells, and so often at all.
LIFT, SEEN = 2, 3

Prompt = str | Messages


class Subject(NamedTuple):
    """What is edited, by its words for a reader: its edits, and the same of something random."""

    words: str
    prompts: list[Prompt]
    edits: dict[str, Clamp | Group]


def main() -> None:
    """Run the measurement."""
    parser = script_options(__doc__, RESULTS / "edits.json")
    parser.add_argument("model", type=Path, help="the directory of a model with a labelled lens")
    parser.add_argument("--prompts", type=int, default=3, help="of each subject")
    parser.add_argument("--tokens", type=int, default=32, help="of each text")
    args = parser.parse_args()
    lm = prismlm.load(args.model)
    assert lm.lens is not None
    listed = read_json(Path(__file__).with_name("prompts.json"))
    prompts: list[Prompt] = [*listed["texts"]]
    prompts += [as_chat(one) for one in listed["questions"] if lm.tokenizer.chat_template]
    draw = np.random.default_rng(0)
    leading, words = leading_prompts(lm, lm.lens, prompts, args), category_words(lm.lens)
    rows: list[dict[str, Any]] = []
    clamped = [*prototypes(lm.lens, draw, prompts[: args.prompts])]
    for subjects in (clamped, [*categories(lm.lens, draw, leading)]):
        for subject in subjects:
            print(subject.words, flush=True)
            others = [one.words for one in subjects if one.words != subject.words]
            own = words.get(subject.words)
            for row in (
                row for one in subject.prompts for row in written(lm, subject, one, args, own)
            ):
                choices = [subject.words, *draw.choice(others, CHOICES - 1, replace=False).tolist()]
                rows.append(row | {"words": subject.words, "choices": choices})
                draw.shuffle(choices)
    for row, number in zip(rows, draw.permutation(len(rows)).tolist(), strict=True):
        row["id"] = f"t{number:03}"
    rows.sort(key=lambda row: row["id"])
    head = {"prototypes": lm.head.num_prototypes, "per_token": lm.head.prototypes_per_token}
    setting = {"model": head, "prompts": args.prompts, "tokens": args.tokens}
    curve = repetition_curve(lm, clamped, args)
    result = {"environment": environment(), **setting, "curve": curve, "texts": rows}
    write_json(args.out, result)
    blind = ({key: row[key] for key in ("id", "text", "choices")} for row in rows)
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in blind)
    args.out.with_name("edits_texts.jsonl").write_text(lines, encoding="utf-8")


def shown(prompt: Prompt) -> str:
    """Return a prompt as a person wrote it."""
    return prompt if isinstance(prompt, str) else f"{prompt[-1]['content']}\n"


def ranked(lens: Lens) -> dict[str, list[int]]:
    """Return the prototypes of each category, the categories with the largest usage first."""
    usage = lens.prototypes["usage"].to_numpy()
    members: dict[str, list[int]] = {}
    for i in np.argsort(-usage, kind="stable").tolist():
        if (name := lens.categories[i]) is not None:
            members.setdefault(name, []).append(i)
    return dict(sorted(members.items(), key=lambda item: -usage[item[1]].sum()))


def prototypes(lens: Lens, draw: np.random.Generator, prompts: list[Prompt]) -> Iterator[Subject]:
    """Yield of each of the most used categories, in turn, the most used prototype not yet taken.

    Of those that were labelled with a score and whose card begins with a word of some letters.
    """
    table = lens.prototypes.to_pylist()
    whole = [
        [
            i
            for i in members
            if table[i]["label_score"] is not None
            and (token := table[i]["top_tokens"][0]).startswith(" ")
            and len(token.strip()) >= LETTERS
        ]
        for members in ranked(lens).values()
    ]
    in_turn = [some[turn] for turn in range(PROTOTYPES) for some in whole if turn < len(some)]
    for i in in_turn[:PROTOTYPES]:
        like = sorted(
            in_turn[PROTOTYPES:] or in_turn,
            key=lambda j, i=i: abs(table[j]["usage"] - table[i]["usage"]),
        )
        control = Clamp(int(draw.choice(like[:LIKE])), 1.0)
        words = ", ".join(different_words(table[i]["top_tokens"]))
        yield Subject(words, prompts, {"edited": Clamp(i, 1.0), "control": control})


def categories(
    lens: Lens, draw: np.random.Generator, leading: dict[str, list[Prompt]]
) -> Iterator[Subject]:
    """Yield the most used categories: added, taken out, and as many random prototypes added."""
    for category, members in list(ranked(lens).items())[:CATEGORIES]:
        others = [i for i in range(len(lens.categories)) if i not in set(members)]
        random = draw.choice(others, min(len(members), len(others)), replace=False).tolist()
        edits: dict[str, Clamp | Group] = {
            "edited": Group(1.0, category=category),
            "control": Group(1.0, prototypes=frozenset(random)),
            "removed": Group(-1.0, category=category),
        }
        yield Subject(category, leading[category], edits)


@torch.no_grad()
def leading_prompts(
    lm: prismlm.PrismLM, lens: Lens, prompts: list[Prompt], args: Any
) -> dict[str, list[Prompt]]:
    """Return for each of the most used categories the prompts at which it carries most.

    In the order of its share of the evidence for the top tokens of the text written there.
    """
    read: list[SteeredPredictions] = []
    for prompt in prompts:
        ids = lm.encode(prompt, args.tokens)
        text = lm.write(ids, args.tokens, 0.0, 0)
        read.append(steered_predictions(plan_for(lm, []), text, [], ids.shape[1] - 1))
    leading: dict[str, list[Prompt]] = {}
    for category, members in list(ranked(lens).items())[:CATEGORIES]:
        order = np.argsort(
            [-evidence_share(lm, one, members) for one in read], kind="stable"
        ).tolist()
        leading[category] = [prompts[n] for n in order[: args.prompts]]
    return leading


def category_words(lens: Lens) -> dict[str, set[int]]:
    """Return the tokens that come next in a category's cells more often than usual.

    ``LIFT`` times as often as in all cells, and ``SEEN`` times at least. Cards, which an edit acts
    by, have no part in it.
    """
    assert lens.cells is not None
    keys, starts = lens.cells.keys_and_starts
    size = np.diff(np.append(starts, lens.cells.meta.rows))
    cell, token = np.divmod(keys, lens.cells.meta.vocabulary)
    everywhere = np.bincount(token, size)
    words = {}
    for category, members in list(ranked(lens).items())[:CATEGORIES]:
        own = np.isin(cell, members)
        here = np.bincount(token[own], size[own], len(everywhere))
        more = here / here.sum() >= LIFT * everywhere / everywhere.sum()
        words[category] = set(np.flatnonzero(more & (here >= SEEN)).tolist())
    return words


@torch.no_grad()
def repetition_curve(
    lm: prismlm.PrismLM, subjects: list[Subject], args: Any
) -> list[dict[str, float]]:
    """Return what each step of strength adds to the share of repeated 3-grams, a mean over clamps.

    Of the texts of each subject's first prompt.
    """
    added: list[list[float]] = [[] for _ in range(STRENGTH_STEPS)]
    for subject in subjects:
        ids, clamp = lm.encode(subject.prompts[0], args.tokens), subject.edits["edited"]
        assert isinstance(clamp, Clamp)
        texts = [lm.write(ids, args.tokens, 0.0, 0)]
        for step in range(1, STRENGTH_STEPS + 1):
            with lm.edit(replace(clamp, fraction=MAX_STRENGTH * step / STRENGTH_STEPS)):
                texts.append(lm.write(ids, args.tokens, 0.0, 0))
        plain, *edited = (repetition(text[0, ids.shape[1] :].tolist()) for text in texts)
        for values, repeated in zip(added, edited, strict=True):
            values.append(repeated - plain)
    return [
        {
            "strength": MAX_STRENGTH * step / STRENGTH_STEPS,
            "repeated": float(np.mean(values)),
            "within": float(np.mean(np.array(values) <= MAX_REPETITION)),
        }
        for step, values in enumerate(added, start=1)
    ]


@torch.no_grad()
def written(
    lm: prismlm.PrismLM, subject: Subject, prompt: Prompt, args: Any, words: set[int] | None
) -> Iterator[dict[str, Any]]:
    """Yield a text without edits and one under each of them, with what the edit did.

    Of a category, also the share of the text's tokens that are ``words`` of it.

    The strength is found for the subject, and the control has the same.
    """
    ids = lm.encode(prompt, args.tokens)
    start = ids.shape[1]
    plain = lm.write(ids, args.tokens, 0.0, 0)[0, start:].tolist()

    def row(kind: str, tokens: list[int]) -> dict[str, Any]:
        before = shown(prompt)
        fields = {"kind": kind, "prompt": before, "text": before + lm.words(torch.tensor(tokens))}
        if words is None:
            return fields
        return fields | {"telling": sum(one in words for one in tokens) / max(1, len(tokens))}

    yield row("plain", plain)
    strength = 0.0
    for kind, edit in subject.edits.items():
        if kind == "edited":
            edit = strongest(lm, prompt, edit, generate=args.tokens)
            strength = edit.fraction if isinstance(edit, Clamp) else edit.strength
        elif kind == "control":
            clamped = isinstance(edit, Clamp)
            edit = replace(edit, **{"fraction" if clamped else "strength": strength})
        with lm.edit(edit):
            full = lm.write(ids, args.tokens, 0.0, 0)
        after = full[0, start:].tolist()
        read = steered_predictions(plan_for(lm, [edit]), full, [], start - 1)
        kl = F.kl_div(read.after, read.before, reduction="none", log_target=True).sum(1)
        yield row(kind, after) | {
            "strength": strength,
            "repeated": repetition(after) - repetition(plain),
            "kl": float(kl[: len(after)].mean()),
        }


if __name__ == "__main__":
    main()
