import math
from contextlib import contextmanager

import numpy as np
import pytest
import yaml

from prismlm.corpus import Corpus
from prismlm.training import build_recipe, train
from prismlm.training.verdict import unigram_ce, verdict
from tests.helpers import forked


class Recording:
    """Keeps the tasks that are opened, and how much of each was done."""

    def __init__(self):
        self.tasks = []

    @contextmanager
    def task(self, description, total=None, unit="tokens"):
        self.tasks.append([description, total, 0])
        yield self

    def advance(self, amount=1):
        self.tasks[-1][2] += amount

    def note(self, text):
        self.text = text


@pytest.mark.parametrize("head", [True, False])
def test_a_run_ends_with_perplexity_a_verdict_and_the_next_command(settings, tmp_path, head):
    settings["head"]["enabled"] = head
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    done = forked.run("train", path)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    out, corpus = settings["out"], settings["corpus"]
    assert "Perplexity on held-out text: " in shown
    assert "guessing tokens by their frequency alone" in shown
    following = f"index {out} --corpus {corpus}"
    if not head:
        following = f"attach {out} --corpus {corpus} --out {out}-attached"
    assert done.stdout.splitlines()[-1].strip() == f"prismlm {following}"
    assert "passes over" not in done.stderr


def test_many_passes_over_few_documents_are_warned_of_at_the_start(settings):
    settings["data"]["documents"] = 5
    told = []
    recipe, reporter = build_recipe(settings | {"steps": 60}), Recording()
    result = train(recipe, progress=reporter, on_warning=told.append)
    (warning,) = told
    passes = float(warning.split()[0])
    assert passes > 4.5
    assert " passes over 5 documents: beyond 4, " in warning
    enough = int(warning.split("--set steps=")[1].split(")")[0])
    assert enough == pytest.approx(60 * 4 / passes, abs=60 * 4 / passes / 10 + 1)
    # Each step of a run shows the time left, which takes a total.
    assert [task[0] for task in reporter.tasks] == ["training", "measuring quality"]
    assert all(total and done for _, total, done in reporter.tasks)
    assert result.to_dict()["perplexity"] == pytest.approx(math.exp(result.ce))
    assert result.to_dict()["verdict"] == result.verdict


def test_the_cross_entropy_of_guessing_by_frequency(tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    counts = {}
    for split in ("train", "heldout"):
        counts[split] = np.zeros(len(corpus.tokenizer))
        for number in corpus.split(split):
            for token in corpus.tokens(int(corpus.starts[number]), int(corpus.lengths[number])):
                counts[split][token] += 1
    guess = (counts["train"] + 1) / (counts["train"] + 1).sum()
    expected = -(counts["heldout"] * np.log(guess)).sum() / counts["heldout"].sum()
    assert unigram_ce(corpus) == pytest.approx(expected)
    assert 0 < expected < math.log(len(corpus.tokenizer))


@pytest.mark.parametrize(
    ("ce", "evaluations", "said"),
    [
        (7.0, (), "has learned nothing yet"),
        (6.0, (6.5, 6.1), "2.7 times as perplexed"),
        (6.0, (5.5, 5.54), "2.7 times as perplexed"),
        (6.0, (5.5, 5.9), "was better on held-out text at step 10:"),
    ],
)
def test_verdicts(ce, evaluations, said):
    history = [{"step": 10 * n, "eval_ce": one} for n, one in enumerate(evaluations, 1)]
    assert said in verdict(ce, 7.0, [{"step": 1, "loss": 9.0}, *history])
