"""Heads that look for a role, planted and among others."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.explain.attention_maps import Head
from prismlm.models.decoders.signal_noise import SignalNoiseConfig, SignalNoiseForCausalLM
from prismlm.probes.heads import roles

LENGTH = 18
DRAWS = 10_000


def test_the_bundled_sentences(tokenizer):
    cases = roles.load_role_cases()
    # The subject's place must differ, or a head that looks at one place would seem to look for it.
    places = [len(case.text[:start].split()) for case in cases
              for role, start, _ in case.marks if role == "subject"]  # fmt: skip
    assert max(places.count(place) for place in places) <= len(places) // 3
    for case in cases:
        text = roles.role_text(tokenizer, case)
        assert set(text.roles) == {"subject", "object", "structure", "action"}


def test_a_case_in_tokens(tokenizer):
    case = roles.parse_case(
        "The {subject:frog} went, and {action:found} some old {object:key} by the {target:to}"
    )
    text = roles.role_text(tokenizer, case)
    assert tokenizer.decode(text.ids) == case.text
    words = ["".join(tokenizer.decode([text.ids[t]]) for t in word) for word in text.words]
    assert [word.strip() for word in words] == (
        ["frog", "went", "and", "found", "some", "old", "key", "by", "the"]
    )
    assert text.roles == {"subject": (0,), "object": (6,), "action": (3,)}
    assert tokenizer.decode(text.ids[text.predicting + 1 :]).strip() == "to"
    # "the" predicts the target, so it cannot be what it looks at.
    assert text.visible("object") == list(range(8))
    assert text.visible("subject") == list(range(9))


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        ("The {subjct:frog} saw the {target:door}", "Did you mean 'subject'"),
        ("The {subject:frog saw the {target:door}", "like {subject:frog} and {target:door}"),
        ("The {subject:frog} saw a {target:door} there", "at the end"),
        ("The frog saw some {object:stones} {target:to}", "not before the token that predicts"),
        ("The {subject:frog and toad} {target:sat}", "expected at least as many others"),
        ("{structure:The} frog saw a {target:door}", "part of the first word"),
    ],
)
def test_cases_that_cannot_be_read_or_measured(tokenizer, marked, words):
    with pytest.raises(InputError, match=words):
        roles.role_text(tokenizer, roles.parse_case(marked))


def test_sums_by_hand():
    weights = torch.tensor(
        [[[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0], [0.1, 0.6, 0.3, 0, 0],
          [0.1, 0.2, 0.3, 0.4, 0], [0.1, 0.3, 0.2, 0.1, 0.3]]]
    )  # fmt: skip
    # The last token is that of the first word again, so its row does not count for that word.
    text = roles.RoleText((4, 7, 8, 9, 7), ((1,), (2,), (3,)), {"subject": (0,), "object": (0,)}, 3)
    again = roles.RoleText((4, 7, 8, 9, 8), ((1, 2), (3,)), {"subject": (0,)}, 3)
    for case, role, given, alike in (
        (text, "subject", [0.6 + 0.2, 0.3 + 0.2, 0.1], [1 / 3 + 1 / 4, 1 / 4 + 1 / 5, 1 / 5]),
        (text, "object", [0.2, 0.3], [1 / 4, 1 / 4]),
        (again, "subject", [0.5 + 0.3, 0.1], [2 / 4 + 1 / 5, 1 / 5]),
    ):
        mass, uniform = roles.word_sums(weights, case, role)
        assert mass[0].tolist() == pytest.approx(given)
        assert uniform.tolist() == pytest.approx(alike)


def softmax(scores):
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(mask, -torch.inf).softmax(-1)


def distances(length):
    return torch.arange(length)[:, None] - torch.arange(length)


def test_a_head_that_goes_by_distance_is_expected_as_it_is():
    heads = []
    for length in (12, 9):
        d = distances(length).double()
        heads.append(torch.stack([softmax(-d / 2), softmax(d.sin()), softmax(0 * d)]))
        # What the first token takes is apart, whatever it is.
        heads[-1][:, 1:, 1:] *= 0.4
        heads[-1][:, 1:, 0] = 1 - heads[-1][:, 1:, 1:].sum(-1)
    for own, usual in zip(heads, roles.expected_by_distance(heads), strict=True):
        assert torch.allclose(own, usual, atol=1e-6)
    changed = [heads[0].clone(), heads[1]]
    changed[0][0, 8, 3] += 0.2
    assert (changed[0] - roles.expected_by_distance(changed)[0])[0, 8, 3] > 0.1


def sentences(count=14):
    generator = torch.Generator().manual_seed(3)
    texts = []
    for _ in range(count):
        places = (torch.randperm(LENGTH - 4, generator=generator)[:4]).tolist()
        marks = {"subject": (places[0],), "object": (places[1],), "action": tuple(places[2:])}
        words = tuple((token,) for token in range(1, LENGTH - 1))
        texts.append(roles.RoleText(tuple(range(LENGTH)), words, marks, LENGTH - 2))
    return texts


def planted(texts):
    """Return weights of heads: subject, object, then uniform, previous, sink, decay, random."""
    generator = torch.Generator().manual_seed(4)
    weights = []
    for text in texts:
        d = distances(LENGTH).double()
        noise = torch.randn(12, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
        scores = torch.cat([noise[:2], torch.zeros(4, LENGTH, LENGTH).double(), noise[2:] * 2])
        scores[0, :, 1 + text.roles["subject"][0]] += 2
        scores[1, text.predicting, 1 + text.roles["object"][0]] += 4
        scores[3] -= 6 * (d - 1).abs()
        scores[4, :, 0] += 4
        scores[5] -= d / 3
        weights.append(softmax(scores))
    return weights


def test_planted_heads_are_found_and_others_are_not():
    texts = sentences()
    heads = [Head(0, n, "signal", n) for n in range(16)]
    search = roles.score_roles(texts, planted(texts), heads, draws=DRAWS)
    result = [(row["role"], row["head"]) for row in search.rows if row["q"] <= roles.LEVEL]
    assert result == [("subject", 0), ("object", 1)]
    assert [facts["found"] for facts in search["roles"].values()] == [1, 1, 0, 0]
    assert search["roles"]["subject"] == {"sentences": 14, "words": 14, "found": 1}
    best = search.rows[0]
    assert best["lift"] > 2 * best["control"]
    assert best["rank"] == 1
    assert best["p"] == 1 / (search["draws"] + 1)
    lifts = {row["head"]: row for row in search.rows if row["role"] == "subject"}
    assert lifts[2]["lift"] == pytest.approx(1, abs=1e-4)
    assert lifts[2]["excess"] == pytest.approx(0, abs=1e-4)
    assert lifts[2]["p"] == 1
    # By distance alone: all draws tie in what goes beyond it.
    assert [lifts[n]["rank"] for n in (3, 4, 5)] == [search["draws"] + 1] * 3
    assert search["roles"]["structure"]["sentences"] == 0
    shown = [row["role"] for row in roles.best_heads(search).rows]
    assert shown == ["subject", "object", "action"]


def test_a_model_is_searched(tokenizer):
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1}
    model = SignalNoiseForCausalLM(SignalNoiseConfig(**size, head_size=4)).eval()
    # Training changes λ, which the configuration does not say.
    model.set_noise_weight(0.07)
    cases = roles.load_role_cases()[:3]
    search = roles.search_roles(model, tokenizer, cases)
    assert [row["role"] for row in search.rows] == [
        role for role in search["roles"] for _ in range(8)
    ]
    other = roles.random_model(model, 5)
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert torch.equal(other.lm_head.weight, roles.random_model(model, 5).lm_head.weight)
    assert other.model.noise_weight == model.model.noise_weight
