"""The ten sequences of prototypes, channels and heads of tiny models."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import prismlm
from prismlm.errors import InputError
from prismlm.models.attention import head_writes
from prismlm.probes.theme_judges import Judgement
from prismlm.probes.themes import (
    MARKED,
    SIDE,
    channels_or_heads,
    prototypes,
    random_spans,
    read_spans,
    theme_figures,
)
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_llama, make_model


@pytest.fixture(scope="module")
def lm(tiny_model):
    return prismlm.load(tiny_model)


def test_a_prototype_has_its_nearest_places_and_none_twice(lm):
    lens, vectors = lm.lens, lm.head.prototypes
    found, left_out = prototypes(lens, vectors, 60, seed=3)
    assert found
    assert len(found) + left_out == 60
    assert prototypes(lens, vectors, 60, seed=3) == (found, left_out)
    corpus = lens.corpus
    text = read_spans(corpus, [span for unit in found for span in unit.spans])
    directions = torch.nn.functional.normalize(vectors.detach().float(), dim=-1)
    for unit in found:
        number = int(unit.name.removeprefix("prototype "))
        places = [span.marked[0] for span in unit.spans]
        kept = lens.index["position"].to_numpy()[lens.rows_of(number)]
        # The nearest of all is the first; those kept in the index come before the rest of the cell.
        assert places[0] == kept[0]
        later = [place for place in places if place not in kept]
        rows = np.flatnonzero(np.isin(lens.cells.positions(0, len(lens.cells)), later))
        records = lens.cells.records(rows)
        near = dict(
            zip(
                records["position"].tolist(),
                (lens.cells.codes.states(records) @ directions[number]).tolist(),
                strict=True,
            )
        )
        assert [near[p] for p in later] == sorted((near[p] for p in later), reverse=True)
        spans = sorted(unit.spans, key=lambda span: span.start)
        for one, other in pairwise(spans):
            assert one.start + one.length <= other.start
        for span in unit.spans:
            assert span.length <= 2 * SIDE + 1
            assert corpus.document_at(span.start) == span.document
            passage = text[span]
            token = corpus.excerpt(span.marked[0], 1)
            assert token in passage.words[passage.marked[0]]
            assert "".join(passage.words) == corpus.excerpt(span.start, span.length)


def test_a_lens_without_its_corpus_is_refused(lm, monkeypatch):
    monkeypatch.setattr(type(lm.lens), "corpus", None)
    with pytest.raises(InputError, match="is not there any more"):
        prototypes(lm.lens, lm.head.prototypes)


def test_channels_have_what_writes_most(corpus, sequences):
    model = make_model(len(corpus.tokenizer))
    found, left_out = channels_or_heads(model, sequences, "channel")
    assert (len(found), left_out) == (LAYERS * CHANNELS, 0)
    assert channels_or_heads(model, sequences, "channel", 1, 2)[0][0].name.startswith(
        "layer 1 · channel"
    )
    assert all(len(unit.spans) == 10 for unit in found)
    assert all(len(span.marked) <= MARKED for unit in found for span in unit.spans)
    with pytest.raises(InputError, match="there is no layer 3"):
        channels_or_heads(model, sequences, "channel", 3)


def test_heads_rank_by_the_norm_of_what_they_write(corpus, sequences):
    model = make_llama(len(corpus.tokenizer))
    found, left_out = channels_or_heads(model, sequences, "head", layer=1)
    assert [unit.name for unit in found] == [f"layer 1 · head {h}" for h in range(4)]
    assert not left_out
    totals = {}
    for batch in sequences.batches():
        writes = head_writes(model, batch.input_ids, batch.attention_mask)[1]
        for row, owned in enumerate(batch.owned):
            if owned.any():
                totals[int(batch.positions[row][owned][0])] = writes[row][owned]
    for head, unit in enumerate(found):
        best = sorted((float(one[:, head].sum()) for one in totals.values()), reverse=True)[:10]
        own = [float(totals[span.start][:, head].sum()) for span in unit.spans]
        assert own == pytest.approx(best, rel=1e-4)
        span = unit.spans[0]
        first = int(totals[span.start][:, head].argmax())
        assert span.marked[0] == span.start + first


def test_random_sequences_have_the_shapes_of_the_units(corpus, sequences):
    found, _ = channels_or_heads(make_model(len(corpus.tokenizer)), sequences, "channel", 0)
    drawn = random_spans(found, corpus, "all", 30, 0)
    shapes = [(s.length, len(s.marked)) for unit in found for s in unit.spans][:30]
    assert [(span.length, len(span.marked)) for span in drawn] == shapes
    assert drawn == random_spans(found, corpus, "all", 30, 0)
    assert drawn != random_spans(found, corpus, "all", 30, 1)
    assert len({span.document for span in drawn}) > 10
    for span in drawn:
        end = int(corpus.starts[span.document] + corpus.lengths[span.document])
        assert corpus.starts[span.document] <= span.start <= span.start + span.length < end
        assert len({*span.marked}) == len(span.marked)
        assert all(span.start <= place < span.start + span.length for place in span.marked)


@pytest.mark.parametrize(
    ("own", "chance"),
    [((8, 2, None, 9) * 9, (3, None, 1, None) * 9), ((8, None), (None, None)), ((7,), (2,))],
)
def test_the_difference_is_of_the_means_beside_it_where_some_have_no_answer(own, chance):
    judged, random = (
        tuple(None if x is None else Judgement("it", x, 1, 1, "") for x in some)
        for some in (own, chance)
    )
    found = theme_figures(judged, random).rows[0]
    apart = found["difference"]
    if found["random_mean"] is None:
        assert np.isnan(apart.value)
    else:
        assert apart.value == pytest.approx(found["mean"] - found["random_mean"])
        assert apart.low <= apart.value <= apart.high
