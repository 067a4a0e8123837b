import shutil
from dataclasses import replace

import pytest
import torch

import prismlm
from prismlm.explain.attribution import Passage, Share, Sources
from prismlm.explain.trace import summarise
from prismlm.lens.cells import UNKNOWN
from prismlm.models.sidecar import load_sidecar, save_sidecar


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        # Shares of the evidence and of the corpus.
        ({"law": (0.8, 0.1), "finance": (0.2, 0.9)}, ["mostly", "“law”: 80%"]),
        ({"law": (0.25, 0.1), "art": (0.25, 0.1)}, ["more than usual", "“law”: 25%"]),
        (
            {"finance": (0.75, 0.68), "law": (0.15, 0.058), "art": (0.1, 0.262)},
            ["more than usual", "“law”: 15%"],
        ),
        ({"finance": (0.75, 0.68), "law": (0.25, 0.32)}, ["no domain much more"]),
        ({UNKNOWN: (0.4, None), "art": (0.1, None)}, ["text of unknown domain: 40%"]),
        ({"law": (0.6, 1.0)}, ["60%", "this corpus."]),
        ({"law": (0.01, 0.5)}, ["Almost none"]),
        ({}, ["Almost none"]),
    ],
)
def test_what_leads_is_named(parts, named):
    items = tuple(Share(key, *rates) for key, rates in parts.items())
    shares = Sources("domain", items, 1 - sum(item.share for item in items))
    for document, leading in ((None, ""), (Passage("a/1", 0.1, *[None] * 5, 0), "“a/1”, with 10%")):
        text = summarise("the answer", shares, document, None, 9)
        assert all(part in text for part in named)
        assert leading in text or "Almost none" in named
    assert "only document" in summarise("the text", shares, None, None, 1) or "Almost none" in named


def test_what_the_corpus_does_not_hold_is_said_first(lm):
    noise = lm.explain("qzx vvk 9!~ jjw {{ %% kqz ]] xx zzq 0x7 ~~ qj")
    assert noise.support.level == "none"
    assert noise.summary == noise.support.sentence
    assert "nothing in this corpus is about the answer" in noise.summary


def test_it_is_said_of_what_is_summed(lm, monkeypatch):
    monkeypatch.setattr(lm.model.generation_config, "eos_token_id", None)
    trace = lm.explain("The cell is", generate=5)
    assert trace.answer == lm.generate("The cell is", tokens=5).removeprefix("The cell is")
    subjects = {"the answer": trace, "the text": trace[:], "the prediction": trace[:1]}
    for subject, one in subjects.items():
        given = one.sources("domain"), one.documents(1)[0], one.support
        assert one.summary == summarise(subject, *given, lm.lens.meta.documents)
        assert one.to_dict()["summary"] == one.summary
    assert trace[:0].summary is None


def test_a_head_that_explains_many_times_the_evidence_is_said_not_to_fit(tiny_model, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path, ignore=shutil.ignore_patterns("lens"))
    sidecar = load_sidecar(path)
    with torch.no_grad():
        sidecar.head.prototypes.mul_(50)
    save_sidecar(path, sidecar)
    trace = prismlm.load(path).explain("The cell is")
    assert "The prototype head does not fit this model: the median" in trace.notes[0]
    assert trace.to_dict()["notes"] == trace.notes
    assert "does not fit this model" in trace.to_html()


def test_of_states_that_are_zero_nothing_is_said(tiny_model):
    lm = prismlm.load(tiny_model)
    whole = lm.explain("The cell is")
    assert whole.notes == []
    assert whole.support is not None
    with torch.no_grad():
        lm.model.model.norm.weight.zero_()
    trace = lm.explain("The cell is")
    assert (
        f"The hidden states of {len(trace)} of {len(trace)} predictions are zero" in trace.notes[0]
    )
    assert trace.support is None
    assert "support" not in trace.to_dict()


def test_a_scale_that_knows_no_difference_gives_no_support(tiny_model):
    """As of a lens that was built of a model or head whose states are all alike."""
    lm = prismlm.load(tiny_model)
    scale = lm.lens.support
    lm.lens.__dict__["support"] = replace(scale, nearest=[0.0] * len(scale.nearest))
    assert lm.explain("The cell is").support is None
