"""A lens gets names, scored by their words, embedded or by a language model; all else stays."""

import json
import re
import shutil
from functools import partial

import numpy as np
import pytest

import prismlm
from prismlm.errors import InputError
from prismlm.files import json_text
from prismlm.lens import layout
from prismlm.lens.labels.contexts import NAME_LENGTH, Label, marked, sample_places
from prismlm.lens.labels.endpoint import Endpoint
from prismlm.lens.labels.write import (
    AFTER,
    BEFORE,
    MIN_PLACES,
    ask_for_names,
    label_lens,
    make_labels,
    score_labels,
)
from tests.helpers.chat_server import ChatServer, good

FILLED = ("description", "category", "role", "tags", "label_score")
MOST = 10


def files_of(lens):
    return {path.name: path.read_bytes() for path in lens.path.iterdir()}


@pytest.fixture(scope="module")
def labelled(tiny_model, tmp_path_factory):
    directory = shutil.copytree(tiny_model, tmp_path_factory.mktemp("labelled") / "model")
    lm = prismlm.load(directory)
    return directory, files_of(lm.lens), lm.lens.prototypes, label_lens(lm.lens, lm.model)


def test_empty_columns_are_filled_and_the_others_stay(labelled):
    directory, before, old, record = labelled
    lens = prismlm.load(directory).lens
    table = lens.prototypes
    for name in old.column_names:
        if name in FILLED:
            assert old[name].null_count == old.num_rows
            assert table[name].null_count < table.num_rows
        elif name not in ("name", "label_source"):
            assert table[name].equals(old[name]), name
    assert table["label_source"].to_pylist().count("embedded") == record["named"]
    changed = {name for name, data in files_of(lens).items() if before.get(name) != data}
    assert changed == {layout.PROTOTYPES_FILE, layout.META_FILE}
    lens.files.check()
    assert lens.meta.labels == json.loads(json.dumps(record))
    # Names tell more than shuffled ones.
    assert record["fuzzing"]["mean"] > record["fuzzing"]["shuffled"] + 0.05
    assert record["fuzzing"]["low"] > 0


def test_labels_are_replaced_only_if_asked(labelled):
    lm = prismlm.load(labelled[0])
    with pytest.raises(InputError, match=r"names already.*embedded.*--overwrite"):
        label_lens(lm.lens, lm.model)
    names = lm.lens.names
    assert label_lens(lm.lens, lm.model, overwrite=True) == labelled[3]
    assert prismlm.load(labelled[0]).lens.names == names


def test_a_right_name_scores_above_others(lm, text):
    """Names with the very words that come next, one that occurs nowhere, and none at all."""
    places = sample_places(lm.lens.cells, lm.lens.num_prototypes, 60)
    cells, labels = np.flatnonzero(places.size >= 20)[:40].tolist(), [None] * len(places.size)
    for cell in cells:
        tokens = set(text.next(places)[places.cell == cell].tolist())
        labels[cell] = Label(" ".join(text.texts[t] for t in tokens), "", "", "", ())
    nowhere, unnamed = cells[:2]
    labels[nowhere], labels[unnamed] = Label("qqq", "", "", "", ()), None
    scores = score_labels(labels, text, places)
    assert scores.fuzzing[nowhere] == scores.detection[nowhere] == 0.5
    assert np.isnan(scores.fuzzing[unnamed])
    assert np.isfinite(scores.fuzzing).sum() == len(cells) - 1
    assert np.nanmean(scores.fuzzing) > np.nanmean(scores.shuffled_fuzzing) + 0.1
    again = score_labels(labels, text, places)
    np.testing.assert_array_equal(scores, again)


# ----- by a language model


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    return prismlm.load(shutil.copytree(tiny_model, tmp_path_factory.mktemp("asked") / "model"))


@pytest.fixture(scope="module")
def made(model):
    return make_labels(model.lens, model.model)


@pytest.fixture
def answers(model, made, monkeypatch):
    """The file of answers, which is removed after each test; embedded names are made once."""
    monkeypatch.setattr("prismlm.lens.labels.write.make_labels", lambda *_: made)
    path = model.lens.path.with_name(f".{model.lens.path.name}.answers.jsonl")
    yield path
    path.unlink(missing_ok=True)


def ask(model, *behave, prototypes=MOST):
    """Have prototypes named; return the record, the questions, and the named rows by prototype."""
    with ChatServer(*behave) as server:
        endpoint = Endpoint(server.url, "m", retries=0, timeout=5.0)
        labeller = partial(ask_for_names, endpoint=endpoint, prototypes=prototypes)
        record = label_lens(model.lens, model.model, overwrite=True, labeller=labeller)
    questions = [request["messages"][0]["content"] for request in server.requests]
    rows = {row["prototype"]: row for row in model.lens.prototypes.to_pylist()}
    named = {i: row for i, row in rows.items() if row["label_source"] == "endpoint:m"}
    return record, questions, named


def test_prototypes_with_most_text_get_names_and_the_others_keep_theirs(model, made, answers):
    record, questions, rows = ask(model)
    named, sizes = list(rows), model.lens.cell_sizes
    asked = record["asked"]
    assert len(named) == MOST == asked["named"]
    # All positions count, not the sample of each cell that names are made of.
    assert min(sizes[named]) >= max(np.delete(sizes, named))
    assert max(np.bincount(made.places.cell)) < max(sizes)
    for row, label in zip(model.lens.prototypes.to_pylist(), made.labels, strict=True):
        if row["label_source"] == "endpoint:m":
            assert row["name"].startswith("next ")
            assert row["description"] == "Described in a line."
            assert (row["category"], row["role"]) == ("Science / Tech", "noun-like")
            assert row["tags"] == ["trials"]
        elif sizes[row["prototype"]] < MIN_PLACES:
            assert (row["name"], row["label_source"]) == ("", "signature")
        elif label is not None:
            assert (row["name"], row["label_source"]) == (label.name, "embedded")
    assert record["source"] == "endpoint:m"
    assert model.lens.meta.labels == json.loads(json.dumps(record))
    # The same passages, by the same words, with the names that these prototypes had.
    scores = asked["scores"]
    assert scores["own"]["fuzzing"]["mean"] != scores["embedded"]["fuzzing"]["mean"]
    assert asked["requests"] == MOST == len(questions)
    assert (asked["tokens_in"], asked["tokens_out"]) == (100 * MOST, 10 * MOST)


def test_documents_that_score_are_never_shown(model, made, answers):
    shown = "".join(ask(model, prototypes=None)[1])
    held_out = np.random.default_rng(0).random(len(model.lens.cells.documents)) < 0.2

    def windows(places):
        return [row.tobytes() for row in made.text.window(places, BEFORE, AFTER)]

    def count_shown(places, rows):
        texts = (marked(made.text, places, row, BEFORE, AFTER)[0] for row in rows)
        return sum(json_text({"passage": text})[1:-1] in shown for text in texts)

    assert not held_out[made.places.document].any()
    assert held_out[made.held_out.document].all()
    # A passage of documents of both kinds, such as a licence, is shown from one that names.
    naming = set(windows(made.places))
    others = [row for row, window in enumerate(windows(made.held_out)) if window not in naming]
    assert count_shown(made.held_out, others[::8]) == 0
    assert count_shown(made.places, range(0, len(made.places.cell), 16)) > 50


def test_a_question_has_passages_of_the_prototype_and_its_signature(model, made, answers):
    _, (content,), rows = ask(model, prototypes=1)
    ((cell, row),) = rows.items()
    lines = [json.loads(line) for line in content.splitlines() if line.startswith("{")]
    assert list(lines[0]) == list(dict.fromkeys(row["top_tokens"]))
    tokens = set(made.text.next(made.places)[made.places.cell == cell].tolist())
    following = {made.text.spelled([token]) for token in tokens}
    assert len(lines) == 13
    for line in lines[1:]:
        assert line["next"] in following
        assert re.search(r"<<.+>>", line["passage"], re.DOTALL)


def test_prototypes_without_an_answer_keep_their_names_and_are_counted(model, made, answers):
    cards = set()

    def behave(request, number):
        card = request["messages"][0]["content"]
        if len(cards) < 3 or card in cards:
            cards.add(card)
            return {**good(request), "category": "Cookery"}
        return good(request)

    record, _, rows = ask(model, behave)
    assert record["asked"]["named"] == len(rows) == MOST - 3
    assert sum(record["asked"]["failures"].values()) == 3
    embedded = [
        row for row in model.lens.prototypes.to_pylist() if row["label_source"] == "embedded"
    ]
    assert all(row["name"] == made.labels[row["prototype"]].name for row in embedded)


def test_nothing_is_written_where_most_fail(model, answers):
    before = files_of(model.lens)
    with pytest.raises(InputError, match=r"8 of the first 8 questions.*no JSON object"):
        ask(model, lambda request, number: "rubbish")
    assert files_of(model.lens) == before
    assert [path.name for path in model.lens.path.parent.iterdir()] == [model.lens.path.name]


def test_names_from_an_endpoint_are_one_bounded_line(model, answers):
    text = "two\nlines\r\n\x1b[31mred\0 \u202eturned <b>" + "a" * 10_000

    def behave(request, number):
        dirty = {"name": text, "description": text, "role": text, "tags": [text] * 9 + ["\n"]}
        return {key: dirty.get(key, value) for key, value in good(request).items()}

    (row,) = ask(model, behave, prototypes=1)[2].values()
    for value in (row["name"], row["description"], row["role"], *row["tags"]):
        assert value.isprintable()
        assert 0 < len(value) <= 240
    assert len(row["name"]) <= NAME_LENGTH
    assert len(row["tags"]) == 1
