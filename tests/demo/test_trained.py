"""The demo's trained model, end to end at a tiny size."""

import shutil

import pytest

from prismlm.cli.demo import _summary
from prismlm.cli.output import say
from prismlm.corpus import Corpus
from prismlm.demo import prompts
from prismlm.demo.prompts import PROMPTS
from prismlm.demo.trained import QUICK, DemoSize, run_demo
from prismlm.errors import InputError

HEAD = ("head.prototypes=64", "head.initialise_at_step=5")
EVALUATION = ("evaluation.every=0", "evaluation.final_tokens=1000")
OVERRIDES = ("steps=15", *HEAD, *EVALUATION)
TINY = DemoSize("demo-quick.yaml", vocab_size=1024, every=90, contexts=4, overrides=OVERRIDES)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "GENERATED", 4)
        yield run_demo(tmp_path_factory.mktemp("demo") / "tiny", TINY)


def test_everything_is_there_and_one_prompt_per_domain_is_explained(demo):
    corpus = Corpus.open(demo.corpus)
    assert set(PROMPTS) == set(corpus.column("domain"))
    assert list(demo.answers) == list(PROMPTS.values())
    for trace in demo.answers.values():
        assert trace.answer
        assert trace.passages(limit=1)
    assert demo.report.read_text(encoding="utf-8").startswith("<!")
    assert not demo.cached


def test_the_summary_has_every_answer_and_ends_with_the_way_on(demo, capsys):
    say(*_summary(demo))
    shown = capsys.readouterr().out
    for prompt, trace in demo.answers.items():
        assert " ".join(f"{prompt} {trace.answer}".split()) in " ".join(shown.split())
    assert f"prismlm explore {demo.model}\n" in shown
    assert shown.splitlines()[-1] == str(demo.model)


def test_a_missing_part_alone_is_built_again_and_then_nothing(demo, monkeypatch):
    monkeypatch.setattr(prompts, "PROMPTS", dict(list(PROMPTS.items())[:2]))
    weights = (demo.model / "model.safetensors").stat().st_mtime_ns
    shutil.rmtree(demo.model / "lens")
    assert not run_demo(demo.model.parent, TINY).cached
    again = run_demo(demo.model.parent, TINY)
    assert again.cached
    assert (demo.model / "model.safetensors").stat().st_mtime_ns == weights
    for prompt, trace in again.answers.items():
        assert trace.answer == demo.answers[prompt].answer


def test_another_demo_is_refused_and_something_else_is_left_alone(demo, tmp_path):
    with pytest.raises(InputError, match="another size"):
        run_demo(demo.model.parent, QUICK)
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(InputError, match="no demo made it"):
        run_demo(tmp_path, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
