"""prismlm what-if."""

import json

import pytest

import prismlm
from prismlm.explain.what_if import what_if

TEXT = "The cell is the smallest unit"


@pytest.fixture(scope="module")
def lm(tiny_model):
    return prismlm.load(tiny_model)


def test_json_and_table(prism, document, tiny_model, lm):
    first = lm.explain(TEXT, generate=5).documents(1)[0].doc_id
    command = ("what-if", tiny_model, TEXT, "--without", first, "--generate", 5)
    result = what_if(lm, TEXT, [first], generate=5)
    assert document(*command) == json.loads(json.dumps(result.to_dict())) | {
        "model": str(tiny_model),
        "lens": "sample",
        "prompt": TEXT,
    }
    shown = prism(*command).stdout
    assert "Without 1 document (" in shown
    assert f"{result.estimates[0].change:+.1f}".replace("-", "−") in shown
    assert "they may not hold" in shown


def test_bad_input_is_refused(refused, tiny_model):
    command = ("what-if", tiny_model, TEXT)
    assert "--without" in refused(*command)
    assert "no text of this lens has license=none" in refused(*command, "--without", "license=none")
    again = refused(*command, "--without", "no-such-document", "--generate", 3)
    assert "has no document 'no-such-document'" in again
