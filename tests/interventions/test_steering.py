"""Steering against forward passes under the edit and controls computed one by one."""

import shutil

import numpy as np
import pytest
import torch

import prismlm
from prismlm import Ablate, Clamp, Group, Scale
from prismlm.corpus import Corpus
from prismlm.corpus.pieces import token_alone
from prismlm.errors import InputError
from prismlm.explain.quality import measure_quality
from prismlm.interventions import steering, steering_effects
from prismlm.interventions.plan import plan_for
from prismlm.lens.labels.write import write_columns
from prismlm.lens.signatures import signature_ids
from tests.helpers.edit_models import Flat, make_head, plan

TEXT = "The patient was given a dose of the drug, and the court"
PROMPTS = [TEXT, "Once upon a time there was", "The theory of groups is a part of"]


@pytest.fixture(scope="module")
def leading(lm):
    """The prototype with the largest contribution at the end of TEXT."""
    return lm.explain(TEXT)[-1].prototypes[0].id


@pytest.fixture
def labelled(tiny_model, tmp_path):
    """The tiny model with categories: every fifth prototype, other even ones, none."""
    directory = shutil.copytree(tiny_model, tmp_path / "labelled")
    lens = prismlm.load(directory).lens
    numbers = range(len(lens.prototypes))
    names = ["Fives" if i % 5 == 0 else "Even" if i % 2 == 0 else None for i in numbers]
    write_columns(lens, {"category": names})
    return prismlm.load(directory)


def log_probabilities(lm, ids, *edits):
    with torch.no_grad(), lm.edit(*edits):
        return lm.model(input_ids=ids).logits[0].float().log_softmax(-1)


# -- one text


@pytest.mark.parametrize("kind", [Scale, Clamp])
def test_probabilities_equal_those_of_the_edited_model(lm, leading, kind):
    edit = kind(leading, {Scale: 4.0, Clamp: 0.5}[kind])
    result = steering.steer(lm, TEXT, [edit], generate=8, draws=0)
    with lm.edit(edit):
        assert result.text == lm.generate(TEXT, tokens=8)
    assert result.unedited == lm.generate(TEXT, tokens=8)
    prompt = lm.tokenizer(TEXT)["input_ids"]
    ids = torch.tensor([prompt + [token.token_id for token in result.tokens]])
    before, after = log_probabilities(lm, ids).exp(), log_probabilities(lm, ids, edit).exp()
    assert [token.position for token in result.tokens] == list(range(len(prompt), ids.shape[1]))
    for token in result.tokens:
        index = token.position - 1, token.token_id
        assert token.before == pytest.approx(before[index].item(), abs=1e-5)
        assert token.after == pytest.approx(after[index].item(), abs=1e-5)
        assert token.control is None
    assert max(abs(token.after - token.before) for token in result.tokens) > 0.001


def test_without_generation_the_prompt_is_read(lm, leading):
    result = steering.steer(lm, TEXT, [Scale(leading, 2.0)], generate=0, draws=2)
    assert [token.token_id for token in result.tokens] == lm.tokenizer(TEXT)["input_ids"][1:]
    assert result.text == result.unedited == TEXT
    assert all(token.control is not None for token in result.tokens)
    assert all((token.changed == 0) <= (token.control == token.before) for token in result.tokens)
    with pytest.raises(InputError, match="one token"):
        steering.steer(lm, "a", [Ablate(3)], generate=0)
    with pytest.raises(InputError, match="no edit"):
        steering.steer(lm, TEXT, [])


def test_a_removed_category_no_longer_leads(labelled):
    edit = Group(-1.0, category="Even")
    members = [i for i, name in enumerate(labelled.lens.categories) if name == "Even"]
    assert plan_for(labelled, [edit]).prototypes.tolist() == members
    tokens = steering.steer(labelled, TEXT, [edit], generate=6, draws=2).tokens
    before = {token.leading_before.category for token in tokens}
    assert {"Even"} <= before <= {"Fives", "Even", None}
    assert all(token.leading_after.category != "Even" for token in tokens)
    with pytest.raises(InputError, match=r"it has Even, Fives\. Did you mean 'Even'"):
        labelled.edit(Group(1.0, category="even"))


# -- the control


def edited_states(head, *edits):
    """Return a plan, random states, their changes, and a random order of the prototypes."""
    generator = torch.Generator().manual_seed(3)
    model = Flat(torch.randn(50, head.width, generator=generator))
    z = torch.randn(80, head.width, generator=generator)
    edited = plan(model, head, *edits)
    order = torch.randperm(head.num_prototypes, generator=generator)
    return edited, z, edited.changes(z), order


def control_by_hand(edited, z, changes, n, order, rows):
    """Return the control of position n, change by change; 30 is the clamped prototype."""
    routing, prototypes = changes.routing, edited.prototypes.tolist()
    row = zip(routing.indices[n].tolist(), routing.activations[n].tolist(), strict=True)
    active = {i: a for i, a in row if a > 0}
    free = [i for i in active if i not in prototypes]
    delta = dict(zip(prototypes, (changes.after - changes.before)[n].tolist(), strict=True))
    expected, used = z[n].clone(), set()
    for i in [i for i in active if i != 30 and delta.get(i, 0) != 0]:
        allowed = [j for j in free if j not in used] or free
        near = sorted(allowed, key=lambda j, i=i: abs(active[j] - active[i]))[: steering.NEAREST]
        receiver = min(near, key=order.index)
        used.add(receiver)
        expected += delta[i] * rows[receiver]
    if 30 in delta:
        receiver = next(j for j in order if j not in prototypes and j not in active)
        expected += delta[30] * edited.card_directions([receiver])[0]
    return expected, any(delta.values())


@pytest.mark.parametrize(
    "edits",
    [
        (Scale(3, 2.0), Scale(17, 0.5), Scale(22, 0.0)),
        (Group(-1.0, prototypes=frozenset(range(9))),),
        (Group(0.5, prototypes=frozenset(range(9))),),
        (Clamp(30, 0.4), Ablate(3)),
    ],
    ids=str,
)
def test_the_control_gives_every_change_to_a_prototype_of_similar_activation(edits):
    head = make_head(per_token=12)
    edited, z, changes, order = edited_states(head, *edits)
    state = steering.control_state(edited, z, changes, order)
    raised = any(isinstance(edit, Group) and edit.strength > 0 for edit in edits)
    rows = edited.card_directions(range(head.num_prototypes)) if raised else head.prototypes
    for n in range(len(z)):
        expected, changed = control_by_hand(edited, z, changes, n, order.tolist(), rows)
        torch.testing.assert_close(state[n], expected, atol=1e-5, rtol=1e-5)
        if not changed:
            assert torch.equal(state[n], z[n])
    assert not torch.equal(state, steering.control_state(edited, z, changes, order.flip(0)))


def test_the_control_of_a_clamp_that_is_scaled_moves_both_changes():
    """Also where the prototype was not active before, to two inactive ones."""
    head = make_head()
    edited, z, changes, order = edited_states(head, Clamp(30, 0.4), Scale(30, 3.0))
    state, routing = steering.control_state(edited, z, changes, order), changes.routing
    scaled, clamped = (step.change[:, 0] for step in changes.steps)
    inactive = (changes.before[:, 0] == 0).nonzero()[:, 0].tolist()
    # The head selects it at some of these positions, but it is not active there.
    assert 0 < (routing.indices[inactive] == 30).sum() < len(inactive)
    for n in inactive:
        active = {30, *routing.indices[n][routing.activations[n] > 0].tolist()}
        first, second = [j for j in order.tolist() if j not in active][:2]
        expected = z[n] + scaled[n] * head.prototypes[first]
        expected += clamped[n] * edited.card_directions([second])[0]
        torch.testing.assert_close(state[n], expected, atol=1e-5, rtol=1e-5)


# -- effects


def test_effect_sizes_by_hand():
    names = ("prompts", "edit", "control", "difference", "difference_interval")
    # The mean of three draws from 1, 2, 3 is 1 with probability 1/27 > 2.5 %.
    expected = dict(zip(names, (3, 4.0, 2.0, 2.0, (1.0, 3.0)), strict=True))
    assert (
        steering_effects.summarise([(3.0, 1.0, 3.0), (4.0, 2.0, 2.0), (5.0, 0.0, 4.0)]) == expected
    )
    assert steering_effects.summarise([(3.0,), (1.0,)])["difference"] is None


def test_effects_equal_those_of_the_edited_model(lm, leading):
    edit = Scale(leading, 6.0)
    effects = steering_effects.measure_effects(lm, PROMPTS, [edit], draws=3)
    card = lm.lens.prototypes["top_tokens"][leading].as_py()
    (tokens,) = signature_ids(lm, [leading])
    assert effects["signature_tokens"] == card
    assert [token_alone(lm.tokenizer, token) for token in tokens] == card
    expected = {"signature": [], "text": [], "divergence": []}
    prompts = [torch.tensor([lm.tokenizer(prompt)["input_ids"]]) for prompt in PROMPTS]
    for ids in prompts:
        before, after = log_probabilities(lm, ids), log_probabilities(lm, ids, edit)
        mass = after.exp()[:, tokens].sum(1).log() - before.exp()[:, tokens].sum(1).log()
        expected["signature"].append(mass.mean().item())
        text = (after - before)[:-1].gather(1, ids[0, 1:, None])
        expected["text"].append(text.mean().item())
        divergence = (before.exp() * (before - after)).sum(1)
        expected["divergence"].append(divergence.mean().item())
    assert effects["predictions"] == sum(ids.shape[1] for ids in prompts)
    for name, values in expected.items():
        effect = effects["measures"][name]
        assert effect["edit"] == pytest.approx(np.mean(values), abs=1e-4)
        assert effect["difference"] == pytest.approx(effect["edit"] - effect["control"])


# -- cost


def test_the_cost_is_the_perplexity_of_the_edited_model(lm, tiny_corpus, leading):
    corpus, edit = Corpus.open(tiny_corpus), Clamp(leading, 0.3)
    cost = steering_effects.perplexity_cost(lm, corpus, [edit], tokens=2000, draws=2)
    batches = list(steering_effects.held_out_text(lm, corpus, 2000).batches())
    plain = measure_quality(lm.model, lm.head, lm.logit_map, batches)
    with lm.edit(edit):
        edited = measure_quality(lm.model, lm.head, lm.logit_map, batches)
    assert 1900 < cost.tokens == plain.tokens < 4000
    assert cost.perplexity == pytest.approx(np.exp(plain.ce), rel=1e-4)
    assert cost.edited == pytest.approx(np.exp(edited.ce), rel=1e-4)
    assert cost.edited > 1.01 * cost.perplexity
    assert cost.control is not None
    assert cost.changed == 1
    held_out = set(corpus.split("heldout").tolist())
    assert {d for b in batches for d in b.document.tolist()} <= held_out


# -- strength


def test_the_strongest_edit_is_the_last_step_before_the_text_repeats(lm):
    shares = [steering.repetition(tokens) for tokens in ([1, 2], [1] * 5, [1, 2, 3, 1, 2, 3])]
    assert shares == pytest.approx([0, 2 / 3, 1 / 4])
    ids, fractions = lm.encode(TEXT), set()

    def written_repetition(*edits):
        with lm.edit(*edits):
            return steering.repetition(lm.write(ids, 20, 0.0, 0)[0, ids.shape[1] :].tolist())

    step = steering.MAX_STRENGTH / steering.STRENGTH_STEPS
    for prototype in range(0, 60, 20):
        edit = steering.strongest(lm, TEXT, Clamp(prototype, 1.0), generate=20)
        result = steering.steer(lm, TEXT, [edit], generate=20, draws=0)
        increase = written_repetition(edit) - written_repetition()
        assert result.repeated == pytest.approx(increase)
        assert result.repeats == (increase > steering.MAX_REPETITION)
        assert edit.fraction <= steering.MAX_STRENGTH
        assert edit.fraction <= step or not result.repeats
        if edit.fraction + step < steering.MAX_STRENGTH:
            stronger = Clamp(prototype, edit.fraction + step)
            above = steering.steer(lm, TEXT, [stronger], generate=20, draws=0)
            assert above.repeats
            assert any("begins to repeat" in line for line in steering.cautions(above))
        fractions.add(edit.fraction)
    assert len(fractions) > 1


def test_the_evidence_of_a_set(labelled):
    def read(edit):
        return steering.steer(labelled, TEXT, [edit], generate=0, draws=0)

    even = read(Group(-1.0, category="Even"))
    assert 0.1 < even.active < 1
    assert not steering.cautions(even)
    everything = frozenset(range(labelled.head.num_prototypes))
    assert read(Group(-1.0, prototypes=everything)).active == pytest.approx(1.0)
    used = {use.id for step in labelled.explain(TEXT) for use in step.prototypes}
    unused = read(Group(-1.0, prototypes=everything - used))
    assert unused.active == 0
    assert "hardly active here" in steering.cautions(unused)[0]
    assert read(Clamp(3, 0.2)).active is None
