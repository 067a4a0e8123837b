"""Write texts under edits, and their controls, for a blind reader: docs/results/edits.json.

    prismlm demo --no-serve --out prismlm-demo
    python -m benchmarks.edits.measure prismlm-demo/model

Ten prototypes and six categories are taken by rule. What a reader is given, edits_texts.jsonl,
says of each text nothing but an id; reading_prompt.md is how it is asked, and edits_answers.jsonl,
beside the others, what it answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import prismlm
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus.chat import Messages, asked
from prismlm.edits.plan import plan_for
from prismlm.edits.steering import carried, steered_predictions
from prismlm.edits.strength import repetition, strongest
from prismlm.edits.values import Clamp, Edit, Group
from prismlm.files import read_json, write_json
from prismlm.index.lens import Lens
from prismlm.index.signatures import different_words

SEED = 0
PROTOTYPES, CATEGORIES, OFFERED = 10, 6, 10
LETTERS = 4
LIKE = 50
TRIED = 3
CHOICES = 4
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Subject:
    """What is edited: its words for a reader, its edits, and the same of something random."""

    words: str
    prompts: list[str | Messages]
    edits: dict[str, Edit]


def main() -> None:
    """Run the measurement."""
    parser = script_options(__doc__, RESULTS / "edits.json")
    parser.add_argument("model", type=Path, help="the directory of a model with a labelled lens")
    parser.add_argument("--prompts", type=int, default=3, help="of each subject")
    parser.add_argument("--tokens", type=int, default=32, help="of each text")
    given = parser.parse_args()
    lm = prismlm.load(given.model)
    assert lm.lens is not None
    listed = read_json(HERE / "prompts.json")
    prompts: list[str | Messages] = [*listed["texts"]]
    prompts += [asked(one) for one in listed["questions"] if lm.tokenizer.chat_template]
    draw = np.random.default_rng(SEED)
    moving = moving_prompts(lm, lm.lens, prompts, given)
    subjects = [*prototypes(lm.lens, draw, prompts[: given.prompts])]
    subjects += categories(lm.lens, draw, moving)
    rows: list[dict[str, Any]] = []
    for subject in subjects:
        print(subject.words, flush=True)
        kin = {type(edit) for edit in subject.edits.values()}
        others = [
            o.words for o in subjects if o is not subject and {*map(type, o.edits.values())} == kin
        ]
        for number, prompt in enumerate(subject.prompts):
            for row in written(lm, subject, prompt, given.tokens):
                choices = [subject.words, *draw.choice(others, CHOICES - 1, replace=False).tolist()]
                draw.shuffle(choices)
                rows.append(row | {"prompt": number, "words": subject.words, "choices": choices})
    for row, name in zip(rows, draw.permutation(len(rows)).tolist(), strict=True):
        row["id"] = f"t{name:03}"
    rows.sort(key=lambda row: row["id"])
    write_json(
        given.out,
        {
            "environment": environment(),
            "model": {
                "prototypes": lm.head.num_prototypes,
                "per_token": lm.head.prototypes_per_token,
            },
            "prompts": given.prompts,
            "tokens": given.tokens,
            "moving": {name: [shown(one) for one in found] for name, found in moving.items()},
            "texts": rows,
        },
    )
    blind = [{key: row[key] for key in ("id", "text", "choices")} for row in rows]
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in blind)
    given.out.with_name("edits_texts.jsonl").write_text(lines, encoding="utf-8")
    print(f"wrote {given.out} and edits_texts.jsonl: {len(rows)} texts to be read")


def shown(prompt: str | Messages) -> str:
    """Return a prompt as a person wrote it."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def ranked(lens: Lens) -> list[str]:
    """Return the categories by the usage of their prototypes, the most used first."""
    usage = lens.prototypes["usage"].to_numpy()
    names = sorted({name for name in lens.categories if name is not None})
    sums = {name: usage[[c == name for c in lens.categories]].sum() for name in names}
    return sorted(names, key=lambda name: -sums[name])


def prototypes(
    lens: Lens, draw: np.random.Generator, prompts: list[str | Messages]
) -> Iterator[Subject]:
    """Yield of each of the most used categories, in turn, the most used prototype not yet taken.

    Of those that were labelled with a score and whose card begins with a word of some letters.
    """
    table = lens.prototypes.to_pylist()
    usage = np.array([row["usage"] for row in table])
    whole = [
        i
        for i in np.argsort(-usage, kind="stable").tolist()
        if table[i]["label_score"] is not None
        and table[i]["top_tokens"][0].startswith(" ")
        and len(table[i]["top_tokens"][0].strip()) >= LETTERS
    ]
    taken: list[int] = []
    for turn in range(PROTOTYPES):
        for category in ranked(lens):
            of = [i for i in whole if lens.categories[i] == category]
            taken += [i for i in of[turn : turn + 1] if len(taken) < PROTOTYPES]
    for i in taken:
        like = [j for j in whole if j not in taken]
        like = sorted(like, key=lambda j, i=i: abs(usage[j] - usage[i]))[:LIKE]
        edits: dict[str, Edit] = {
            "edited": Clamp(i, 1.0),
            "control": Clamp(int(draw.choice(like)), 1.0),
        }
        yield Subject(", ".join(different_words(table[i]["top_tokens"])), prompts, edits)


def categories(
    lens: Lens, draw: np.random.Generator, moving: dict[str, list[str | Messages]]
) -> Iterator[Subject]:
    """Yield the most used categories: added, taken out, and as many random prototypes added."""
    for category in ranked(lens)[:CATEGORIES]:
        others = [i for i, name in enumerate(lens.categories) if name != category]
        count = len(lens.categories) - len(others)
        random = draw.choice(others, min(count, len(others)), replace=False).tolist()
        edits: dict[str, Edit] = {
            "edited": Group(1.0, category=category),
            "control": Group(1.0, prototypes=frozenset(random)),
            "removed": Group(-1.0, category=category),
        }
        yield Subject(category, moving[category], edits)


@torch.no_grad()
def moving_prompts(
    lm: prismlm.PrismLM, lens: Lens, prompts: Sequence[str | Messages], given: Any
) -> dict[str, list[str | Messages]]:
    """Return of each of the most used categories the prompts at which it moves the text.

    In the order of the share that it carries there of the evidence for the top tokens, those whose
    text is another one with the category taken out.
    """
    ids = [lm.encode(one, given.tokens) for one in prompts]
    plain = [lm.write(one, given.tokens, 0.0, SEED) for one in ids]
    read = [
        steered_predictions(lm, plan_for(lm, []), text, [], one.shape[1] - 1)
        for one, text in zip(ids, plain, strict=True)
    ]
    found: dict[str, list[str | Messages]] = {}
    for category in ranked(lens)[:OFFERED]:
        members = [i for i, name in enumerate(lens.categories) if name == category]
        shares = [carried(lm, one, members) for one in read]
        moved: list[int] = []
        still: list[int] = []
        for n in np.argsort(-np.array(shares), kind="stable").tolist():
            if len(moved) == given.prompts or len(moved + still) == TRIED * given.prompts:
                break
            with lm.edit(Group(-1.0, category=category)):
                text = lm.write(ids[n], given.tokens, 0.0, SEED)
            (still if torch.equal(text, plain[n]) else moved).append(n)
        found[category] = [prompts[n] for n in (moved + still)[: given.prompts]]
        print(f"{category}: {len(moved)} of {len(moved + still)} prompts move", flush=True)
    return found


@torch.no_grad()
def written(
    lm: prismlm.PrismLM, subject: Subject, prompt: str | Messages, tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield a text without edits and one under each of them, with what the edit did.

    The strength is found for the subject, and the control has the same.
    """
    ids = lm.encode(prompt, tokens)
    start, strength = ids.shape[1], 0.0
    plain = lm.write(ids, tokens, 0.0, SEED)[0, start:].tolist()
    yield {"kind": "plain", "text": text_of(lm, prompt, plain)}
    for kind, edit in subject.edits.items():
        if kind == "edited":
            edit = strongest(lm, prompt, edit, generate=tokens)
            strength = edit.fraction if isinstance(edit, Clamp) else edit.strength
        elif kind == "control":
            edit = at(edit, strength)
        with lm.edit(edit):
            full = lm.write(ids, tokens, 0.0, SEED)
        after = full[0, start:].tolist()
        predicted = steered_predictions(lm, plan_for(lm, [edit]), full, [], start - 1)
        kl = F.kl_div(predicted.after, predicted.before, reduction="none", log_target=True).sum(1)
        yield {
            "kind": kind,
            "text": text_of(lm, prompt, after),
            "strength": edit.fraction if isinstance(edit, Clamp) else edit.strength,
            "repeated": repetition(after) - repetition(plain),
            "kl": float(kl[: len(after)].mean()),
            "changed": 1 - len({*after} & {*plain}) / len({*after} | {*plain}),
        }


def at(edit: Clamp | Group, strength: float) -> Clamp | Group:
    """Return an edit of another strength."""
    if isinstance(edit, Clamp):
        return Clamp(edit.prototype, strength)
    return Group(strength, prototypes=edit.prototypes)


def text_of(lm: prismlm.PrismLM, prompt: str | Messages, tokens: list[int]) -> str:
    """Return what a reader sees: the prompt and what was written after it."""
    words = str(lm.tokenizer.decode(tokens, skip_special_tokens=True))
    return f"{shown(prompt)}{'' if isinstance(prompt, str) else chr(10)}{words}"


if __name__ == "__main__":
    main()
