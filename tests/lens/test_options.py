"""The corpus that a model directory says it was trained on."""

import json

import pytest

from prismlm.errors import InputError
from prismlm.lens.options import training_corpus
from tests.helpers.mixer_models import make_corpus, make_model, save_model


def test_a_directory_that_does_not_say_or_says_otherwise(tmp_path):
    corpus = make_corpus(tmp_path)
    model = make_model(len(corpus.tokenizer))
    directory = save_model(model, corpus, tmp_path / "model", trained_on=False)
    for recipe in (None, {"corpus": str(tmp_path / "gone")}, {"corpus": str(corpus.path)}):
        if recipe:
            run = {"recipe": recipe, "corpus": {"fingerprint": "x"}}
            (directory / "training.json").write_text(json.dumps(run))
        with pytest.raises(InputError, match=r"is not there, or has changed.*--corpus"):
            training_corpus(directory)
    # A head's own file comes before the run's.
    provenance = {"recipe": {"corpus": str(corpus.path)}, "corpus": {}}
    (directory / "prismlm.json").write_text(json.dumps({"provenance": provenance}))
    assert training_corpus(directory).name == corpus.name
