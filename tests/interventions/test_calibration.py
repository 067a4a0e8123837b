"""Calibration: gains are slopes, planted tasks are learned, and bad tasks are refused by name."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import prismlm
from prismlm.errors import InputError
from prismlm.interventions import calibration as cal
from prismlm.models.seam import LogitMap

QUESTION = {"context": "The sky is", "choices": ["blue", "green as grass"], "label": 0}


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


def numbered(count, label=lambda n: n % 2):
    """Rows that differ, with two choices each."""
    words = ["sun", "moon", "star", "tree", "house", "water", "fire", "stone", "bread", "hand"]
    return [
        {
            "context": f"The {words[n % 10]} and the {words[n // 10 % 10]} are",
            "choices": ["red and old", "small"],
            "label": label(n),
        }
        for n in range(count)
    ]


# -- reading


@pytest.mark.parametrize("name", ["task.jsonl", "task.parquet"])
def test_both_kinds_of_rows_are_read(tmp_path, name):
    first, *_ = cal.read_examples(write(tmp_path / name, [QUESTION] * 6))
    assert first[:3] == (("The sky is",) * 2, (" blue", " green as grass"), 0)
    rows = [{"prompt": "I say: ", "chosen": "yes", "rejected": "no"}] * 6
    first, *_ = cal.read_examples(write(tmp_path / name, rows))
    assert first[:3] == (("I say: ",) * 2, ("yes", "no"), 0)
    rows = [QUESTION | {"context": ["It is", "They are"]}]
    assert cal.read_examples(write(tmp_path / name, rows))[0].contexts == ("It is", "They are")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows"),
        ([{"question": "?"}], "t.jsonl:1 has question: expected context, choices and"),
        ([QUESTION | {"label": 2}], r"t.jsonl:1 has the label 2: expected .* 0 to 1"),
        ([QUESTION | {"choices": ["blue"]}], r"the choices \['blue'\]: expected a list of two"),
        ([QUESTION | {"context": ["a", "b", "c"]}], "one context, or one for each"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, message):
    with pytest.raises(InputError, match=message):
        cal.read_examples(write(tmp_path / "t.jsonl", rows))


def test_tasks_that_cannot_be_learned_are_refused(lm, tmp_path):
    one = cal.read_examples(write(tmp_path / "one.jsonl", [QUESTION] * 20))
    with pytest.raises(InputError, match=r"have the label 0, such as .*one.jsonl:\d+: a"):
        cal.calibrate(lm, one)
    choices = [f"number {n}" for n in range(29)]
    rows = [{"context": "Which?", "choices": choices, "label": n} for n in range(12)]
    many = cal.read_examples(write(tmp_path / "many.jsonl", rows))
    with pytest.raises(InputError, match="12 examples of up to 29 choices to fit: expected at l"):
        cal.calibrate(lm, many, many)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (" blue", r"two choices of t.jsonl:3 have the same tokens"),
        (" and green" * 600, r"t.jsonl:3 has a choice of .* tokens, and .* reads"),
    ],
)
def test_answers_that_tell_nothing_or_are_too_long_are_refused_and_contexts_cut(lm, other, message):
    with pytest.raises(InputError, match=message):
        cal.read_answers(lm, [cal.Example(("It is",) * 2, (" blue", other), 0, "t.jsonl:3")])
    long = cal.Example(("It is so " * lm.context_length,) * 2, (" blue", " green"), 0)
    assert cal.read_answers(lm, [long]).cut == 2


# -- scores and slopes


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "t.jsonl"
    return cal.read_examples(write(path, numbered(40)))


@pytest.fixture(scope="module")
def answers(lm, examples):
    return cal.read_answers(lm, examples)


@torch.no_grad()
def score(lm, context, choice):
    """Return Σ log p of the tokens of a choice, from the logits of the whole text."""
    ids, start = lm.encode(context + choice), lm.encode(context).shape[1]
    log_p = lm.model(input_ids=ids).logits[0].log_softmax(-1)
    return sum(float(log_p[t - 1, ids[0, t]]) for t in range(start, ids.shape[1]))


def test_scores_are_those_of_the_model_on_each_text_alone(lm, examples, answers):
    log_p, _ = cal.log_probabilities(lm, answers.z, answers.tokens)
    scores = answers.total(log_p)
    for number in (0, 7, 31):
        pair = (part[number % 2] for part in examples[number // 2][:2])
        assert scores[number] == pytest.approx(score(lm, *pair), abs=1e-3)


@pytest.mark.parametrize("logit_map", [LogitMap(scale=0.5), LogitMap(softcap=6.0)])
def test_gains_are_slopes_of_the_true_scores(lm, answers, logit_map, monkeypatch):
    object.__setattr__(lm, "logit_map", logit_map)
    routed = cal.route(lm, answers.z)
    _, slopes = cal.log_probabilities(lm, answers.z, answers.tokens, slopes=True)
    gains = cal.prototype_gains(lm, answers, routed, slopes)
    count = lm.head.num_prototypes
    direction, small = np.random.default_rng(0).normal(size=count), 2e-3
    change = torch.tensor(direction * small, dtype=torch.float32)
    active = routed.activations * change[routed.indices]
    moved = torch.einsum("tk,tkd->td", active, lm.head.prototypes.detach()[routed.indices])
    ahead, behind = (
        answers.total(cal.log_probabilities(lm, answers.z + u, answers.tokens)[0])
        for u in (moved, -moved)
    )
    slope = (ahead - behind) / (2 * small)
    object.__setattr__(lm, "logit_map", LogitMap())
    np.testing.assert_allclose(gains @ direction, slope, rtol=0.02, atol=0.02)


def test_figures_are_in_float32_although_the_model_is_not(tiny_model, answers):
    lm = prismlm.load(tiny_model)
    weight = lm.model.bfloat16().get_output_embeddings().weight
    expected = (answers.z @ weight.float().T).log_softmax(-1).gather(1, answers.tokens[:, None])
    log_p, _ = cal.log_probabilities(lm, answers.z, answers.tokens, slopes=True)
    torch.testing.assert_close(log_p, expected[:, 0])
    assert lm.model.get_output_embeddings().weight is weight


# -- fitting


def planted(count=80, noise=3.0):
    """Questions of three answers, where the right one gains from column 4 alone."""
    draw = np.random.default_rng(0)
    right = draw.integers(3, size=count) + 3 * np.arange(count)
    gains = draw.normal(size=(3 * count, 12)) * 0.3
    gains[:, 4] -= 1
    gains[right, 4] += 3
    scores = draw.normal(size=3 * count) * noise
    return cal.Scored(scores, cal.sparse.csr_array(gains), 3 * np.arange(count), right)


def test_the_column_that_tells_is_found_and_others_left():
    own = planted()
    offsets, _, losses = cal.choose(own)
    before = cal.is_right(own.scores, own.starts, own.right).mean()
    after = cal.is_right(own.scores + own.gains @ offsets, own.starts, own.right).mean()
    assert after > before + 0.2
    assert offsets.argmax() == 4
    assert offsets[4] > 5 * np.delete(np.abs(offsets), 4).max()
    assert min(losses) < losses[0]
    # Where no column tells anything, the controller is as good as empty.
    draw = np.random.default_rng(5).normal(size=own.gains.shape)
    offsets, *_ = cal.choose(own._replace(gains=cal.sparse.csr_array(draw)))
    assert np.abs(offsets).max() < 0.1


def test_the_fit_minimises_its_loss_within_the_box():
    own = planted()

    def objective(u, pull):
        scores = own.scores + own.gains @ u
        return own.loss(scores)[0].mean() + pull * np.abs(u).sum()

    for pull in (0.001, 0.03):
        u = cal.fit(own, pull)
        assert u.min() >= -1
        assert u.max() <= 4
        draw = np.random.default_rng(1)
        for _ in range(50):
            other = np.clip(u + draw.normal(size=len(u)) * 0.05, -1, 4)
            assert objective(other, pull) >= objective(u, pull) - 1e-6
    # The largest slope at 1: with a stronger pull nothing moves.
    slope = np.abs(own.loss(own.scores)[1] @ own.gains).max() / len(own.right)
    assert not cal.fit(own, slope * 1.001).any()
    assert cal.fit(own, slope * 0.95).any()


def test_calibrate_learns_which_ending_is_wanted_and_says_so(lm, tmp_path):
    rows = [row | {"label": 0} for row in numbered(60)]
    for n, row in enumerate(rows):
        if n % 2:
            row["choices"], row["label"] = row["choices"][::-1], 1
    examples = cal.read_examples(write(tmp_path / "t.jsonl", rows))
    controller, report = cal.calibrate(lm, examples, description="longer answers")
    assert (report["fitted"], report["tested"]) == (48, 12)
    assert controller.head == cal.prototypes_fingerprint(lm.head)
    assert [one["prototype"] for one in report["controller"]] == controller.prototypes
    assert report["after"] >= report["before"]
    # The change is that of the model under the edit.
    test = [cal.Example(one.contexts, (" red", " small"), 0) for one in examples[:10]]
    controller, report = cal.calibrate(lm, examples, test, seed=0)
    asked = cal.read_answers(lm, test)
    with lm.edit(controller):
        pairs = (pair for example in test for pair in zip(*example[:2], strict=True))
        scores = np.array([score(lm, *pair) for pair in pairs])
    right = cal.is_right(scores, asked.starts, asked.right)
    assert report["before"] < report["after"] == pytest.approx(right.mean())
