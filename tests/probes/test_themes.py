"""The ten sequences of units; themes by words, by hand and planted, and by a server's answers."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from prismlm.errors import InputError
from prismlm.lens.labels.endpoint import Endpoint
from prismlm.models.attention import head_writes
from prismlm.probes import themes
from tests.helpers.chat_server import ChatServer
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_llama
from tests.helpers.token_corpus import excerpt

GOOD = {"theme": "tides", "disentanglement": 9, "coverage": 10, "themes": 1, "explanation": "Sea."}


def passage(text, *marked):
    words = text.split()
    places = [i for i, word in enumerate(words) if word.strip("*") in marked]
    return themes.Passage(tuple(f" {word}" for word in words), tuple(places))


def test_similarities_by_hand():
    # In these every pair shares one of two words: cos = ½ each, and ½ it is that θ becomes.
    common = [passage(f"tide own{i} mark{i}", f"mark{i}") for i in range(20)]
    judge = themes.WordJudge(common)
    rarity = judge.rarities
    assert rarity["tide"] == pytest.approx(math.log(21 / 20.5))
    assert rarity["own3"] == rarity["mark0"] == pytest.approx(math.log(21 / 1.5))
    cosine = rarity["tide"] ** 2 / (rarity["tide"] ** 2 + rarity["own3"] ** 2)
    assert judge.text_threshold == pytest.approx(cosine)
    assert judge.marks_threshold == 0.5
    assert judge.chance == pytest.approx(1.0)
    # Of words that were not seen all are as rare; a word that comes twice counts 1 + ln 2.
    first, second = passage("sea sea salt x", "x"), passage("sea sand y", "y")
    twice = 1 + math.log(2)
    shared = twice / math.sqrt((twice**2 + 1) * 2)
    assert judge.cosine([["sea", "sea", "salt"], ["sea", "sand"]])[0, 1] == pytest.approx(shared)
    assert judge.similarities([first, second])[0, 1] == 2.0
    # Marks: one of two is shared, 1/√2 of a threshold of ½.
    pair = [passage("a x y", "x", "y"), passage("b x z", "x")]
    assert judge.similarities(pair)[0, 1] == pytest.approx(math.sqrt(2))


def test_themes_by_hand():
    # No word of one is in another, so that whatever is shared is more than chance.
    judge = themes.WordJudge([passage(f"left{i} mark{i} right{i}", f"mark{i}") for i in range(20)])
    others = [passage(f"here{i} at{i} there{i}", f"at{i}") for i in range(7)]
    alike = [passage(f"wind{i} high tide{i} rises", "high") for i in range(3)]
    (result,) = judge.judge([[*others, *alike]])
    # Within C the similarity is 2, to the rest 0: 1 + 9 · 3/10, rounded.
    assert (result.themes, result.coverage, result.disentanglement) == (8, 3, 4)
    assert result.theme == "“high” · rises"
    # What is marked alone, and what surrounds it alone, are themes.
    marked = [passage(f"one{i} , two{i}", ",") for i in range(5)]
    about = [passage(f"harbour ships{i} mark{i}", f"mark{i}") for i in range(5)]
    (result,) = judge.judge([[*marked, *about]])
    assert (result.themes, result.coverage) == (2, 5)
    assert themes.clusters(judge.similarities([*marked, *about])).tolist() == [0] * 5 + [1] * 5
    (signs,) = judge.judge([[*marked, *marked]])
    assert signs.theme == "“,”"


@pytest.mark.parametrize("planted", [1, 4])
def test_planted_themes_are_found(planted):
    draw = np.random.default_rng(planted)
    # Words by Zipf's law, as in text.
    chances = 1 / np.arange(1, 3001)

    def drawn(word=None):
        around = draw.choice(3000, 40, p=chances / chances.sum())
        text = [f" w{number}" for number in around]
        text[20] = f" theme{word}" if word is not None else text[20]
        return themes.Passage(tuple(text), (20,))

    judge = themes.WordJudge([drawn() for _ in range(200)])
    units = [[drawn(i % planted) for i in range(10)] for _ in range(8)]
    result = [one for one in judge.judge(units) if one is not None]
    largest = -(-10 // planted)
    # One in twenty random pairs counts as alike: of ten strangers two are.
    assert np.mean([one.themes for one in result]) == pytest.approx(planted, abs=0.3 * planted)
    assert np.mean([one.coverage for one in result]) == pytest.approx(largest, abs=1.3)
    assert (np.mean([one.disentanglement for one in result]) > 7) == (planted == 1)


def unit(number):
    words = ("The", f" tide{number}", " <<is", ">>", " high", "\n")
    return [themes.Passage((*words, f" {i}"), (1, 4)) for i in range(10)]


def test_a_unit_is_asked_about_with_its_marks_and_again_only_without_a_valid_answer(tmp_path):
    wrong = {"tide1": {"coverage": 11}, "tide2": {"theme": " \n"}}

    def behave(request, number):
        text = request["messages"][0]["content"]
        return next((GOOD | rubbish for tide, rubbish in wrong.items() if tide in text), GOOD)

    def judged(*numbers):
        endpoint = Endpoint(server.url, "m", retries=0, timeout=5.0)
        asking = themes.EndpointJudge(endpoint, tmp_path / ".themes.answers.jsonl")
        result = asking.judge([unit(number) for number in numbers])
        return result, sum(asking.session.usage()["failures"].values())

    tides = themes.Judgement("tides", 9, 10, 1, "Sea.")
    with ChatServer(behave) as server:
        assert judged(0) == ([tides], 0)
        # Rubbish is asked for once more, and then is no answer.
        assert judged(0, 1, 2, 3) == ([tides, None, None, tides], 2)
        assert len(server.requests) == 6
        wrong.clear()
        assert judged(0, 1, 2, 3) == ([tides] * 4, 0)
    assert len(server.requests) == 8
    text = server.requests[0]["messages"][0]["content"]
    # Text cannot close the fence around it.
    assert text.count("</data-") == 2
    # Marks of the text itself cannot be taken for ours.
    assert text.count("<< tide") == 10
    assert "‹‹is››<< high>>" in text


def test_a_prototype_has_its_nearest_positions_without_overlaps(lm):
    lens, vectors = lm.lens, lm.head.prototypes
    units, left_out = themes.prototype_units(lens, vectors, 60, seed=3)
    assert units
    assert len(units) + left_out == 60
    assert themes.prototype_units(lens, vectors, 60, seed=3) == (units, left_out)
    corpus, cells = lens.corpus, lens.cells
    passages = themes.mark_passages(corpus, [span for unit in units for span in unit.spans])
    directions = torch.nn.functional.normalize(vectors.detach().float(), dim=-1)
    for unit in units:
        number = int(unit.name.removeprefix("prototype "))
        positions = [span.marked[0] for span in unit.spans]
        contexts = lens.index["position"].to_numpy()[lens.rows_of(number)]
        # The nearest of all is the first; contexts come before the rest of the cell.
        assert positions[0] == contexts[0]
        rest = [position for position in positions if position not in contexts]
        rows = np.flatnonzero(np.isin(cells.records(np.arange(len(cells)))["position"], rest))
        records = cells.records(rows)
        products = (cells.codes.states(records) @ directions[number]).tolist()
        nearness = dict(zip(records["position"].tolist(), products, strict=True))
        assert rest == sorted(rest, key=nearness.get, reverse=True)
        spans = sorted(unit.spans, key=lambda span: span.start)
        assert all(a.start + a.length <= b.start for a, b in pairwise(spans))
        for span in spans:
            assert span.length <= 2 * themes.SIDE_TOKENS + 1
            passage = passages[span]
            assert excerpt(corpus, span.marked[0], 1) in passage.words[passage.marked[0]]
            assert "".join(passage.words) == excerpt(corpus, span.start, span.length)


def test_channels_have_what_writes_most_and_random_sequences_their_shapes(corpus, model, sequences):
    result, left_out = themes.layer_units(model, sequences, "channel")
    assert (len(result), left_out) == (LAYERS * CHANNELS, 0)
    (first, _), _ = themes.layer_units(model, sequences, "channel", 1, 2)
    assert first.name.startswith("layer 1 · channel")
    assert all(len(unit.spans) == 10 for unit in result)
    assert all(len(span.marked) <= themes.MARKED_TOKENS for unit in result for span in unit.spans)
    with pytest.raises(InputError, match="there is no layer 3"):
        themes.layer_units(model, sequences, "channel", 3)
    drawn = themes.random_spans(result, corpus, "all", 30, 0)
    shapes = [(s.length, len(s.marked)) for unit in result for s in unit.spans][:30]
    assert [(span.length, len(span.marked)) for span in drawn] == shapes
    assert drawn == themes.random_spans(result, corpus, "all", 30, 0)
    assert drawn != themes.random_spans(result, corpus, "all", 30, 1)
    for span in drawn:
        end = int(corpus.starts[span.document] + corpus.lengths[span.document])
        assert corpus.starts[span.document] <= span.start <= span.start + span.length < end
        assert all(span.start <= place < span.start + span.length for place in {*span.marked})


def test_heads_rank_by_the_norm_of_what_they_write(corpus, sequences):
    model = make_llama(len(corpus.tokenizer))
    result, left_out = themes.layer_units(model, sequences, "head", layer=1)
    assert [unit.name for unit in result] == [f"layer 1 · head {h}" for h in range(4)]
    assert not left_out
    totals = {}
    for batch in sequences.batches():
        writes = head_writes(model, batch.input_ids, batch.attention_mask)[1]
        for row, owned in enumerate(batch.owned):
            if owned.any():
                totals[int(batch.positions[row][owned][0])] = writes[row][owned]
    for head, unit in enumerate(result):
        best = sorted((float(one[:, head].sum()) for one in totals.values()), reverse=True)[:10]
        own = [float(totals[span.start][:, head].sum()) for span in unit.spans]
        assert own == pytest.approx(best, rel=1e-4)
        span = unit.spans[0]
        first = int(totals[span.start][:, head].argmax())
        assert span.marked[0] == span.start + first


def test_differences_are_of_the_means_of_valid_answers():
    judgements = (
        [None if x is None else themes.Judgement("theme", x, 1, 1, "") for x in column]
        for column in ((8, 2, None, 9) * 9, (3, None, 1, None) * 9)
    )
    row = themes.theme_figures(*judgements).rows[0]
    assert (row["mean"], row["random_mean"]) == (19 / 3, 2)
    difference = row["difference"]
    assert difference.value == pytest.approx(19 / 3 - 2)
    assert difference.low < difference.value < difference.high
