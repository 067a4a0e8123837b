"""A judge that knows is right about every name, and wrong about every other's."""

import json
import shutil

import pytest

import prismlm
from prismlm.labels.by_endpoint import EndpointLabeller
from prismlm.labels.endpoint import Endpoint
from prismlm.labels.judge import trials
from prismlm.labels.write import label_lens, make_labels
from tests.helpers.chat_server import ChatServer


@pytest.fixture(scope="module")
def lm(tiny_model, tmp_path_factory):
    return prismlm.load(shutil.copytree(tiny_model, tmp_path_factory.mktemp("judged") / "model"))


def judged(lm, behave, count):
    lm.lens.path.with_name(f".{lm.lens.path.name}.answers.jsonl").unlink(missing_ok=True)
    with ChatServer(behave) as server:
        endpoint = Endpoint(server.url, "m", retries=0)
        labeller = EndpointLabeller(endpoint, prototypes=0, judged=count)
        return label_lens(lm.lens, lm.model, overwrite=True, labeller=labeller)


def test_embedded_names_are_judged_beside_shuffled_ones(lm):
    made = make_labels(lm.lens, lm.model)
    labels = {cell: label for cell, label in enumerate(made.labels) if label is not None}
    asked = trials(made, labels, 6)
    assert len(asked) == 4 * 6
    known = {trial.question.messages[0]["content"]: trial for trial in asked}

    def behave(request, number):
        trial = known[request["messages"][0]["content"]]
        half = len(trial.firing)
        if trial.own:
            # All that fire; of those with the marked token one that does not as well.
            wrong = min(set(range(2 * half)) - trial.firing)
            return {"passages": [*trial.firing, *[wrong] * (trial.kind == "fuzzing")]}
        return {"passages": list(range(2 * half))}

    found = judged(lm, behave, 6)
    assert found.source == "embedded"
    detection, fuzzing = (found.asked["judged"][kind] for kind in ("detection", "fuzzing"))
    assert (detection["scored"], detection["mean"], detection["shuffled"]) == (6, 1.0, 0.5)
    lost = sum(0.5 / len(t.firing) for t in asked if t.own and t.kind == "fuzzing") / 6
    assert fuzzing["mean"] == pytest.approx(1 - lost)


def test_passages_fire_or_not_and_the_token_is_marked_in_fuzzing_alone(lm):
    made = make_labels(lm.lens, lm.model)
    labels = {cell: label for cell, label in enumerate(made.labels) if label is not None}
    for trial in trials(made, labels, 5):
        content = trial.question.messages[0]["content"]
        passages = content.count('\n{"') - 1
        assert passages == 2 * len(trial.firing) >= 6
        assert (content.count(">>") > passages) == (trial.kind == "fuzzing")
        described = json.loads(next(one for one in content.splitlines() if one.startswith("{")))
        assert (described["name"] == labels[trial.cell].name) == trial.own


def test_a_name_without_all_of_its_answers_is_not_judged(lm):
    made = make_labels(lm.lens, lm.model)
    labels = {cell: label for cell, label in enumerate(made.labels) if label is not None}
    bad = trials(made, labels, 8)[0].question.messages[0]

    def behave(request, number):
        return {"passages": [400 if request["messages"][0] == bad else 0]}

    found = judged(lm, behave, 8)
    assert [found.asked["judged"][kind]["scored"] for kind in ("detection", "fuzzing")] == [7, 8]
    assert list(found.asked["failures"].values()) == [1]
