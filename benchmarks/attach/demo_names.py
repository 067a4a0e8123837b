"""Names for the prototypes of the demo's model by a language model that reads cards.

    python -m benchmarks.attach.demo_names cards WORK/model --out FOLDER
    python -m benchmarks.attach.demo_names names WORK/model --from FOLDER --reader "which model"
    python -m benchmarks.attach.demo_names drawn WORK/model --from FOLDER --out SHEET.jsonl

``cards`` writes ``cards-NN.jsonl``, a card a line, of all prototypes with ten places or more. A
reader is given ``names_prompt.md`` and one such file, and answers with ``names-NN.jsonl``; another
one checks each by ``names_check_prompt.md`` and names anew what does not hold. Where a prototype of
a model before lies near (a cosine of 0.75 or more, three raised tokens in common), its name was the
first answer: so for 1,103 of what ships, each checked on the new card like the others.
``names`` puts them into the lens, scored on places of documents that were on no card, and keeps
the answers as ``docs/results/labels/demo_names.jsonl``. ``demo_model`` then packs them. ``drawn``
writes forty by seed, each with that name and with the one that prismlm gives without a reader,
mixed; another reader is given names and places and says which are clear:
``docs/results/asked/names.jsonl``.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import prismlm
from benchmarks.attach.demo_lessons import lines_of
from benchmarks.shared.options import script_options
from prismlm.files import json_text
from prismlm.lens.labels.contexts import CATEGORIES, Label, marked
from prismlm.lens.labels.write import MIN_PLACES, Named, content_words, label_lens, make_labels

PASSAGES, BEFORE, AFTER, RAISED = 8, 20, 6, 10
DRAWN, DRAWN_SEED = 40, 57
PER_FILE = 120
KEPT = Path("docs/results/labels/demo_names.jsonl")


def _label(answer: dict[str, Any]) -> Label:
    return Label(
        name=answer["name"],
        description=answer["description"],
        category=answer["category"],
        role=answer["role"],
        tags=tuple(answer["tags"]),
        topic=content_words(answer["description"]),
    )


def write_cards(lm: prismlm.PrismLM, out: Path) -> int:
    """Write the cards; return how many there are."""
    lens = lm.lens
    assert lens is not None
    made = make_labels(lens, lm.model)
    raised = lens.prototypes["top_tokens"].to_pylist()
    first = np.searchsorted(made.places.cell, np.arange(lens.num_prototypes + 1))
    cards: list[dict[str, Any]] = []
    for cell in range(lens.num_prototypes):
        begin, end = first[cell : cell + 2].tolist()
        if made.places.size[cell] < MIN_PLACES or begin == end:
            continue
        rows = np.unique(np.linspace(begin, end - 1, min(PASSAGES, end - begin)).astype(int))
        shown = [marked(made.text, made.places, row, BEFORE, AFTER) for row in rows.tolist()]
        cards.append(
            {
                "prototype": cell,
                "places": int(made.places.size[cell]),
                "raises": raised[cell][:RAISED],
                "passages": [{"text": text, "next": after} for text, after in shown],
            }
        )
    out.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(0).permutation(len(cards))
    for number in range(0, len(cards), PER_FILE):
        lines = (json_text(cards[i]) + "\n" for i in order[number : number + PER_FILE].tolist())
        path = out / f"cards-{number // PER_FILE:02}.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
    return len(cards)


def write_drawn(lm: prismlm.PrismLM, folder: Path, out: Path) -> None:
    """Write forty prototypes drawn by seed, each with two names, in an order of no meaning."""
    lens = lm.lens
    assert lens is not None
    read = lens.prototypes["name"].to_pylist()
    cards = {
        card["prototype"]: card["passages"]
        for path in sorted(folder.glob("cards-*.jsonl"))
        for card in lines_of(path)
    }
    label_lens(lens, lm.model, overwrite=True)
    ours = prismlm.load(lm.path).lens
    assert ours is not None
    names = {"reader": read, "embedded": ours.prototypes["name"].to_pylist()}
    random = Random(DRAWN_SEED)
    drawn = random.sample(sorted(number for number in cards if read[number]), DRAWN)
    items = [(number, by, names[by][number]) for number in drawn for by in names]
    random.shuffle(items)
    lines = (
        {"item": i, "prototype": number, "by": by, "name": name, "places": cards[number]}
        for i, (number, by, name) in enumerate(items)
    )
    out.write_text("".join(json_text(line) + "\n" for line in lines), encoding="utf-8")


def read_answers(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the answers by prototype; a line may have a category that there is not."""
    answers = [one for path in sorted(folder.glob("names-*.jsonl")) for one in lines_of(path)]
    assert all(one["category"] in CATEGORIES for one in answers)
    return {one["prototype"]: one for one in answers}


def main() -> None:
    """Write cards, or put names in."""
    parser = script_options(__doc__)
    parser.add_argument("what", choices=("cards", "names", "drawn"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--from", type=Path, dest="folder")
    parser.add_argument("--reader")
    args = parser.parse_args()
    lm = prismlm.load(args.model)
    if args.what == "cards":
        print(write_cards(lm, args.out), "cards")
        return
    if args.what == "drawn":
        write_drawn(lm, args.folder, args.out)
        return
    answers = read_answers(args.folder)
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    lines = (json_text(answers[number]) + "\n" for number in sorted(answers))
    KEPT.write_text("".join(lines), encoding="utf-8")
    assert lm.lens is not None
    labels = {number: _label(answer) for number, answer in answers.items()}
    named = Named(labels, f"language model: {args.reader}", {"answers": len(answers)})
    print(label_lens(lm.lens, lm.model, overwrite=True, labeller=lambda *_: named))


if __name__ == "__main__":
    main()
