"""prismlm suppress: a controller and its report, and what is refused."""

import json

import pytest

import prismlm
from prismlm.corpus import Corpus
from prismlm.lens.layout import prototypes_fingerprint
from tests.helpers import forked

SMALL = ("--phrase", "the", "--samples", 40, "--tokens", 8, "--heldout", 800, "--temperature", 1)


@pytest.fixture(scope="module")
def examples(tiny_corpus, tmp_path_factory):
    corpus = Corpus.open(tiny_corpus)
    path = tmp_path_factory.mktemp("examples") / "examples.jsonl"
    texts = [corpus.text(number)[:600] for number in corpus.split("train")[:60].tolist()]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_controller_is_written(prism, document, tiny_model, examples, tmp_path):
    out = tmp_path / "quiet.safetensors"
    command = ("suppress", tiny_model, "--examples", examples, "--out", out, *SMALL)
    command += ("--target", 0.4, "--max-cost", 100)
    value = document(*command)
    written = prismlm.Controller.load(out)
    lm = prismlm.load(tiny_model)
    assert written.head == prototypes_fingerprint(lm.head)
    assert [list(pair) for pair in value["chosen"]["scales"]] == [
        [i, pytest.approx(s)] for i, s in written.scales
    ]
    assert written.made["by"] == "suppress"
    assert "“the”" in value["judge"]
    with lm.edit(written):
        lm.generate("The", tokens=2)
    shown = prism(*command, "--overwrite").stdout
    for words in ("the text has “the”", "Strengths", "random prototypes", "logit bias"):
        assert words in shown


def test_out_of_reach_the_frontier_is_printed(tiny_model, examples, tmp_path):
    out = tmp_path / "none.safetensors"
    command = ("suppress", tiny_model, "--examples", examples, "--out", out, *SMALL)
    result = forked.run(*command, "--target", 1, "--max-cost", 0)
    assert result.returncode == 2
    assert not out.exists()
    assert "removed" in result.stdout
    assert "nothing was written" in result.stderr


def test_what_is_refused(refused, tiny_model, examples, tmp_path):
    out = tmp_path / "x.safetensors"
    few = tmp_path / "few.txt"
    few.write_text("one text\nanother text\n")
    run = ("suppress", tiny_model, "--out", out)
    assert "there are 2 examples" in refused(*run, "--examples", few)
    assert "2 texts to keep" in refused(*run, "--examples", examples, "--keep", few, *SMALL)
    assert "the target is 2" in refused(*run, "--examples", examples, "--target", 2)
    assert "ends with .safetensors" in refused(
        "suppress", tiny_model, "--examples", examples, "--out", tmp_path / "x.json"
    )
    assert not out.exists()
