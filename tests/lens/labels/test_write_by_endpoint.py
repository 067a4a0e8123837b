"""Names by a language model: of the text that may name, and written whole or not at all."""

import json
import re
import shutil
from functools import partial

import numpy as np
import pytest

import prismlm
from prismlm.errors import InputError
from prismlm.files import json_text
from prismlm.lens.labels.contexts import CATEGORIES, marked
from prismlm.lens.labels.embedded import NAME_LENGTH
from prismlm.lens.labels.endpoint import PROMPTS, Endpoint, fenced, prompt
from prismlm.lens.labels.write import (
    AFTER,
    BEFORE,
    MIN_PLACES,
    ask_for_names,
    label_lens,
    make_labels,
)
from tests.helpers.chat_server import ChatServer, good, wanted

MOST = 10


@pytest.fixture(scope="module")
def lm(tiny_model, tmp_path_factory):
    return prismlm.load(shutil.copytree(tiny_model, tmp_path_factory.mktemp("asked") / "model"))


@pytest.fixture(scope="module")
def made(lm):
    return make_labels(lm.lens, lm.model)


@pytest.fixture(autouse=True)
def nothing_kept(lm):
    yield
    answers_of(lm).unlink(missing_ok=True)


def answers_of(lm):
    return lm.lens.path.with_name(f".{lm.lens.path.name}.answers.jsonl")


def labelled(lm, server, prototypes=MOST):
    endpoint = Endpoint(server.url, "m", retries=0, timeout=5.0)
    labeller = partial(ask_for_names, endpoint=endpoint, prototypes=prototypes)
    return label_lens(lm.lens, lm.model, overwrite=True, labeller=labeller)


def by(lm):
    """Return the rows that an endpoint named, by prototype."""
    rows = lm.lens.prototypes.to_pylist()
    return {row["prototype"]: row for row in rows if row["label_source"] == "endpoint:m"}


def test_those_with_most_text_get_names_and_the_others_keep_theirs(lm, made):
    with ChatServer() as server:
        found = labelled(lm, server)
    rows = lm.lens.prototypes.to_pylist()
    assert len(by(lm)) == MOST == found["asked"]["named"]
    # All positions count, not the sample of each cell that names are made of.
    sizes = lm.lens.cell_sizes
    assert min(sizes[list(by(lm))]) >= max(np.delete(sizes, list(by(lm))))
    assert max(np.bincount(made.places.cell)) < max(sizes)
    for row, label in zip(rows, made.labels, strict=True):
        if row["label_source"] == "endpoint:m":
            assert row["name"].startswith("next ")
            assert row["description"] == "Described in a line."
            assert (row["category"], row["role"]) == ("Science / Tech", "noun-like")
            assert row["tags"] == ["trials"]
        elif sizes[row["prototype"]] < MIN_PLACES:
            assert (row["name"], row["label_source"]) == ("", "signature")
        elif label is not None:
            assert (row["name"], row["label_source"]) == (label.name, "embedded")
    assert found["source"] == "endpoint:m"
    assert lm.lens.meta.labels == json.loads(json.dumps(found))
    # The same passages, by the same words, with the names that these prototypes had.
    scores = found["asked"]["scores"]
    assert scores["own"]["fuzzing"]["mean"] != scores["embedded"]["fuzzing"]["mean"]
    assert found["asked"]["requests"] == 2 * MOST == len(server.requests)
    assert (found["asked"]["tokens_in"], found["asked"]["tokens_out"]) == (200 * MOST, 20 * MOST)


def test_documents_that_score_are_never_shown(lm, made):
    with ChatServer() as server:
        labelled(lm, server, None)
    shown = "".join(request["messages"][0]["content"] for request in server.requests)
    drawn = np.random.default_rng(0).random(lm.lens.cells.documents.num_rows) < 0.2

    def windows(places):
        return [row.tobytes() for row in made.text.window(places, BEFORE, AFTER)]

    def seen(places, rows):
        texts = (marked(made.text, places, row, BEFORE, AFTER).text for row in rows)
        return sum(json_text({"passage": text})[1:-1] in shown for text in texts)

    assert not drawn[made.places.document].any()
    assert drawn[made.held_out.document].all()
    # What stands in documents of both kinds, such as a licence, is shown from one that names.
    naming = set(windows(made.places))
    held = [row for row, one in enumerate(windows(made.held_out)) if one not in naming]
    assert seen(made.held_out, held[::8]) == 0
    assert seen(made.places, range(0, len(made.places.cell), 16)) > 50


def test_passages_are_of_the_prototype_and_its_signature_is_there(lm, made):
    with ChatServer() as server:
        labelled(lm, server, 1)
    (cell,) = by(lm)
    content = server.requests[0]["messages"][0]["content"]
    lines = [json.loads(line) for line in content.splitlines() if line.startswith("{")]
    row = lm.lens.prototypes.slice(cell, 1).to_pylist()[0]
    assert list(lines[0]) == list(dict.fromkeys(row["top_tokens"]))
    tokens = set(made.text.next(made.places)[made.places.cell == cell].tolist())
    following = {made.text.spelled([token]) for token in tokens}
    assert len(lines) == 13
    for line in lines[1:]:
        assert line["next"] in following
        assert re.search(r"<<.+>>", line["passage"], re.DOTALL)
    # The second pass goes on from the first, whose name it is shown.
    first, second = server.requests
    assert second["messages"][0] == first["messages"][0]
    assert by(lm)[cell]["name"] == json.loads(second["messages"][1]["content"])["name"]


def test_what_gets_no_answer_keeps_its_name_and_is_counted(lm, made):
    bad = {"name": lambda text: "?", "category": lambda text: {**good(text), "category": "Cookery"}}
    for kind, answer in bad.items():
        cards = set()

        def behave(request, number, kind=kind, answer=answer, cards=cards):
            card = request["messages"][0]["content"]
            if wanted(request) == kind and (len(cards) < 3 or card in cards):
                cards.add(card)
                return answer(request)
            return good(request)

        with ChatServer(behave) as server:
            found = labelled(lm, server)
        assert found["asked"]["named"] == len(by(lm)) == MOST - 3
        assert sum(found["asked"]["failures"].values()) == 3
        kept = [row for row in lm.lens.prototypes.to_pylist() if row["label_source"] == "embedded"]
        assert all(row["name"] == made.labels[row["prototype"]].name for row in kept)
        answers_of(lm).unlink()


def test_where_most_fail_nothing_is_written(lm):
    before = {path: path.read_bytes() for path in lm.lens.path.iterdir()}
    several = r"8 of the first 8 questions.*no JSON object"
    with (
        ChatServer(lambda request, number: "rubbish") as server,
        pytest.raises(InputError, match=several),
    ):
        labelled(lm, server)
    assert {path: path.read_bytes() for path in lm.lens.path.iterdir()} == before
    assert not answers_of(lm).exists()
    assert [path.name for path in lm.lens.path.parent.iterdir()] == [lm.lens.path.name]


@pytest.mark.parametrize(
    "text", ["a" * 10_000, "two\nlines\r\n\x1b[31mred\0 \u202eturned", "<script>alert(1)</script>"]
)
def test_names_from_outside_are_one_bounded_line(lm, text):
    def behave(request, number):
        dirty = {"name": text, "description": text, "role": text, "tags": [text] * 9 + ["\n"]}
        return {key: dirty.get(key, value) for key, value in good(request).items()}

    with ChatServer(behave) as server:
        labelled(lm, server, 1)
    (row,) = by(lm).values()
    for value in (row["name"], row["description"], row["role"], *row["tags"]):
        assert value.isprintable()
        assert 0 < len(value) <= 240
    assert len(row["name"]) <= NAME_LENGTH
    assert len(row["tags"]) == 1
    if "<" in text:
        assert row["name"] == text


def test_prompts_hold_every_category_and_text_cannot_leave_its_fence():
    assert set(re.findall(r'^- "(.*?)":', PROMPTS["category"], re.MULTILINE)) == set(CATEGORIES)
    text = fenced("a $name\nb")
    inside = fenced(text + "\n# again")
    assert inside.splitlines()[0] not in text
    assert inside in prompt("name", data=inside)
