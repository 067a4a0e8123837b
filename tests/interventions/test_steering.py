"""What steer says, against forward passes under the edit and controls worked out one by one."""

import shutil
from collections import Counter

import numpy as np
import pytest
import torch

import prismlm
from prismlm import Ablate, Clamp, Group, Scale
from prismlm.corpus import Corpus
from prismlm.corpus.pieces import token_alone
from prismlm.errors import InputError
from prismlm.explain.quality import measure_quality
from prismlm.interventions.plan import plan_for
from prismlm.interventions.steering import (
    MAX_REPETITION,
    MAX_STRENGTH,
    NEAREST,
    STRENGTH_STEPS,
    cautions,
    control_state,
    repetition,
    steer,
    strongest,
)
from prismlm.interventions.steering_effects import (
    held_out_batches,
    measure_effects,
    perplexity_cost,
    summarise,
)
from prismlm.lens.labels.write import write_columns
from prismlm.lens.signatures import signature_ids, tokens_of_group
from tests.helpers.edit_models import Flat, make_head, plan

TEXT = "The patient was given a dose of the drug, and the court"
PROMPTS = [TEXT, "Once upon a time there was", "The theory of groups is a part of"]


@pytest.fixture(scope="module")
def lm(tiny_model):
    return prismlm.load(tiny_model)


@pytest.fixture(scope="module")
def leading(lm):
    """The prototype that carries most where TEXT ends."""
    return lm.explain(TEXT)[-1].prototypes[0].id


@pytest.fixture
def labelled(tiny_model, tmp_path):
    """The tiny model with categories: even prototypes and every fifth, others without."""
    directory = shutil.copytree(tiny_model, tmp_path / "labelled")
    lens = prismlm.load(directory).lens
    table = lens.prototypes
    names = ["Fives" if i % 5 == 0 else "Even" if i % 2 == 0 else None for i in range(len(table))]
    write_columns(lens, {"category": names})
    return prismlm.load(directory)


def log_probabilities(lm, ids):
    with torch.no_grad():
        return lm.model(input_ids=ids).logits[0].float().log_softmax(-1)


# -- one text


@pytest.mark.parametrize("kind", ["scale", "ablate", "clamp"])
def test_probabilities_are_those_of_the_model_in_an_edit(lm, leading, kind):
    edit = {
        "scale": Scale(leading, 4.0),
        "ablate": Ablate(leading),
        "clamp": Clamp(leading, 0.5),
    }[kind]
    result = steer(lm, TEXT, [edit], generate=8, draws=0)
    with lm.edit(edit):
        assert result.text == lm.generate(TEXT, tokens=8)
    assert result.unedited == lm.generate(TEXT, tokens=8)
    prompt = lm.tokenizer(TEXT)["input_ids"]
    ids = torch.tensor([prompt + [token.token_id for token in result.tokens]])
    before = log_probabilities(lm, ids).exp()
    with lm.edit(edit):
        after = log_probabilities(lm, ids).exp()
    assert [token.position for token in result.tokens] == list(range(len(prompt), ids.shape[1]))
    for token in result.tokens:
        row = token.position - 1
        assert token.before == pytest.approx(before[row, token.token_id].item(), abs=1e-5)
        assert token.after == pytest.approx(after[row, token.token_id].item(), abs=1e-5)
        assert token.control is None
    assert max(abs(token.after - token.before) for token in result.tokens) > 0.001


def test_without_generation_the_prompt_is_read(lm, leading):
    result = steer(lm, TEXT, [Scale(leading, 2.0)], generate=0, draws=2)
    ids = lm.tokenizer(TEXT)["input_ids"]
    assert [token.token_id for token in result.tokens] == ids[1:]
    assert result.text == result.unedited == TEXT
    assert all(token.control is not None for token in result.tokens)
    assert all((token.changed == 0) <= (token.control == token.before) for token in result.tokens)


def test_categories(labelled):
    edit = Group(-1.0, category="Even")
    members = [i for i, name in enumerate(labelled.lens.categories) if name == "Even"]
    assert plan_for(labelled, [edit]).prototypes.tolist() == members
    tokens = steer(labelled, TEXT, [edit], generate=6, draws=2).tokens
    before = {token.leading_before.category for token in tokens}
    assert before <= {"Fives", "Even", None}
    assert "Even" in before
    assert all(token.leading_after.category != "Even" for token in tokens)
    with pytest.raises(InputError, match=r"it has Even, Fives\. Did you mean 'Even'"):
        labelled.edit(Group(1.0, category="even"))


def test_a_strengthened_category_raises_the_tokens_that_tell_it(labelled):
    categories = labelled.lens.categories
    fives, even = ([i for i, c in enumerate(categories) if c == one] for one in ("Fives", "Even"))
    told = tokens_of_group(labelled, fives)
    cards = labelled.lens.prototypes["top_tokens"].to_pylist()
    listed = Counter(token for i in fives for token in cards[i])
    everywhere = Counter(token for card in cards for token in card)
    for token in told:
        text = token_alone(labelled.tokenizer, token)
        assert listed[text] / everywhere[text] > len(fives) / len(cards)
    ids = torch.tensor([labelled.tokenizer(TEXT)["input_ids"]])
    masses = []
    for edit in (Group(0.4, category="Fives"), Group(0.4, prototypes=frozenset(even))):
        with labelled.edit(edit):
            masses.append(log_probabilities(labelled, ids)[:, told].logsumexp(1).mean())
    plain = log_probabilities(labelled, ids)[:, told].logsumexp(1).mean()
    assert masses[0] > plain + 0.5
    assert masses[0] > masses[1] + 0.5


def test_the_prototypes_of_a_document(lm):
    row = lm.lens.index.slice(40, 1).to_pylist()[0]
    members = plan_for(lm, [Group(0.5, document=row["doc_id"])]).prototypes.tolist()
    assert row["prototype"] in members
    rows = lm.lens.index.to_pylist()
    assert members == sorted({r["prototype"] for r in rows if r["doc_id"] == row["doc_id"]})
    with pytest.raises(InputError, match="no document 'nowhere'"):
        lm.edit(Group(0.5, document="nowhere"))


# -- the control


def test_the_control_by_hand():
    """τ = 1, ‖z‖ = 1, so activations are the coordinates of z: .7, .5, .4, .3, .1 (and 0)."""
    head = make_head(6, 6, 6, scale=1.0)
    head.prototypes.copy_(torch.eye(6))
    z = torch.tensor([[0.7, 0.5, 0.4, 0.3, 0.1, 0.0]])
    made = plan(Flat(torch.eye(6)), head, Ablate(1))
    changes = made.changes(z)
    # Nearest to .5 in activation: .4, .7 and .3, .1. In the order, 5 (inactive) and 4 come first.
    state = control_state(made, z, changes, torch.tensor([5, 1, 4, 0, 3, 2]))
    torch.testing.assert_close(state - z, torch.tensor([[0, 0, 0, 0, -0.5, 0.0]]))
    # Of two edits, the second does not take what the first has taken.
    made = plan(Flat(torch.eye(6)), head, Ablate(1), Ablate(0))
    state = control_state(made, z, made.changes(z), torch.tensor([5, 1, 4, 0, 3, 2]))
    torch.testing.assert_close(state - z, torch.tensor([[0, 0, 0, -0.5, -0.7, 0.0]]))
    # A clamp goes to one that is inactive: here there is none left but the last, so it takes
    # another candidate only when it has to. 0.9 less the mean 1/6 is the evidence of the top.
    z = torch.tensor([[0.9, 0.0, 0.1, 0.0, 0.0, 0.0]])
    made = plan(Flat(torch.eye(6)), head, Clamp(1, 0.5))
    state = control_state(made, z, made.changes(z), torch.tensor([0, 2, 1, 4, 3, 5]))
    torch.testing.assert_close(state - z, torch.tensor([[0, 0, 0, 0, (0.9 - 1 / 6) / 2, 0.0]]))


@pytest.mark.parametrize(
    "edits",
    [
        (Ablate(3),),
        (Scale(3, 2.0), Scale(17, 0.5), Scale(22, 0.0)),
        (Group(-1.0, prototypes=frozenset(range(9))),),
        (Group(0.5, prototypes=frozenset(range(9))),),
        (Clamp(30, 0.4), Ablate(3)),
    ],
    ids=str,
)
def test_the_control_gives_every_change_to_a_prototype_of_equal_activation(edits):
    generator = torch.Generator().manual_seed(3)
    head = make_head(per_token=12)
    model = Flat(torch.randn(50, head.width, generator=generator))
    z = torch.randn(80, head.width, generator=generator)
    made = plan(model, head, *edits)
    changes = made.changes(z)
    order = torch.randperm(head.num_prototypes, generator=generator)
    state = control_state(made, z, changes, order)
    # The prototypes are more than the width, so changes are read off one at a time.
    rank = {p: n for n, p in enumerate(order.tolist())}
    edited, clamped = set(made.prototypes.tolist()), 30
    difference = changes.after - changes.before
    raised = any(isinstance(edit, Group) and edit.strength > 0 for edit in edits)
    rows = made.card_directions(range(head.num_prototypes)) if raised else head.prototypes
    for n in range(len(z)):
        row = zip(
            changes.routing.indices[n].tolist(),
            changes.routing.activations[n].tolist(),
            strict=True,
        )
        active = {i: a for i, a in row if a > 0}
        free = {i: a for i, a in active.items() if i not in edited}
        delta = dict(zip(made.prototypes.tolist(), difference[n].tolist(), strict=True))
        expected, taken = z[n].clone(), set()
        for i in [i for i in active if i in edited - {clamped} and delta[i] != 0]:
            allowed = [j for j in free if j not in taken] or list(free)
            near = sorted(allowed, key=lambda j, i=i: abs(active[j] - active[i]))[:NEAREST]
            receiver = min(near, key=lambda j: rank[j])
            taken.add(receiver)
            expected += delta[i] * rows[receiver]
        inactive = [j for j in order.tolist() if j not in edited and j not in active]
        if clamped in delta:
            expected += delta[clamped] * made.card_directions(inactive[:1])[0]
        torch.testing.assert_close(state[n], expected, atol=1e-5, rtol=1e-5)
        if not any(delta.values()):
            assert torch.equal(state[n], z[n])
    assert not torch.equal(state, control_state(made, z, changes, order.flip(0)))


# -- effects


def test_effect_sizes_by_hand():
    effect = summarise([(3.0, 2.0), (4.0, 2.0), (5.0, 2.0)])
    assert (effect.prompts, effect.edit, effect.control, effect.difference) == (3, 4.0, 2.0, 2.0)
    assert effect.d == pytest.approx(2.0)  # differences 1, 2, 3: mean 2, standard deviation 1
    # The mean of three draws from 1, 2, 3 is 1 with probability 1/27 > 2.5 %.
    assert effect.difference_interval == (1.0, 3.0)
    alone = summarise([(3.0, 2.0)])
    assert (alone.difference, alone.difference_interval, alone.d) == (1.0, None, None)
    assert summarise([(3.0, None), (1.0, None)]).difference is None


def test_effects_are_those_of_the_model_in_an_edit(lm, leading):
    edit = Scale(leading, 6.0)
    effects = measure_effects(lm, PROMPTS, [edit], draws=3)
    listed = lm.lens.prototypes["top_tokens"][leading].as_py()
    assert effects.signature_tokens == tuple(listed)
    (top,) = signature_ids(lm, [leading])
    assert [token_alone(lm.tokenizer, token) for token in top] == listed
    wanted = {"signature": [], "text": [], "divergence": []}
    for prompt in PROMPTS:
        ids = torch.tensor([lm.tokenizer(prompt)["input_ids"]])
        before = log_probabilities(lm, ids)
        with lm.edit(edit):
            after = log_probabilities(lm, ids)
        mass = after.exp()[:, top].sum(1).log() - before.exp()[:, top].sum(1).log()
        wanted["signature"].append(mass.mean().item())
        change = (after - before)[:-1].gather(1, ids[0, 1:, None])
        wanted["text"].append(change.mean().item())
        divergence = (before.exp() * (before - after)).sum(1)
        wanted["divergence"].append(divergence.mean().item())
    assert effects.predictions == sum(len(lm.tokenizer(p)["input_ids"]) for p in PROMPTS)
    for name, values in wanted.items():
        effect = effects.measures[name]
        assert effect.edit == pytest.approx(np.mean(values), abs=1e-4)
        assert effect.difference == pytest.approx(effect.edit - effect.control)
    assert measure_effects(lm, PROMPTS, [edit], draws=3) == effects
    assert measure_effects(lm, PROMPTS, [edit], draws=3, seed=1) != effects


def test_a_clamp_holds_the_token_that_the_card_lists_first(lm):
    """At one activation the first listed token gets the asked share of the unedited top logit."""
    weight = lm.model.get_output_embeddings().weight.detach()
    z = torch.randn(20, lm.head.width, generator=torch.Generator().manual_seed(1))
    logits = z @ weight.T
    top = logits.max(-1).values - logits.mean(-1)
    largest = (weight @ lm.head.prototypes.T).argmax(0).tolist()
    listed = lm.lens.prototypes["top_tokens"].to_pylist()
    first = [token_alone(lm.tokenizer, token) for token in largest]
    differ = [i for i, texts in enumerate(listed) if texts[0] != first[i]]
    assert len(differ) > 20
    for prototype in differ[:5]:
        ((token, *_),) = signature_ids(lm, [prototype])
        assert token_alone(lm.tokenizer, token) == listed[prototype][0]
        plan = plan_for(lm, [Clamp(prototype, 0.3)])
        changes = plan.changes(z)
        held = changes.after[:, 0] * (weight[token] @ lm.head.prototypes[prototype])
        torch.testing.assert_close(held, 0.3 * top)
        # The part of the prototype that is added gives its first token as much.
        moved = ((plan.apply(z) - z) @ weight.T)[:, token]
        torch.testing.assert_close(moved, held - changes.before[:, 0] * held / changes.after[:, 0])


# -- cost


def test_the_cost_is_the_perplexity_of_the_model_in_an_edit(lm, tiny_corpus, leading):
    corpus = Corpus.open(tiny_corpus)
    edit = Clamp(leading, 0.3)
    cost = perplexity_cost(lm, corpus, [edit], tokens=2000, draws=2)
    batches = held_out_batches(lm, corpus, 2000, 0)
    plain = measure_quality(lm.model, lm.head, lm.logit_map, batches)
    with lm.edit(edit):
        edited = measure_quality(lm.model, lm.head, lm.logit_map, batches)
    assert cost.tokens == plain.tokens == 2000
    assert cost.perplexity == pytest.approx(np.exp(plain.ce), rel=1e-4)
    assert cost.edited == pytest.approx(np.exp(edited.ce), rel=1e-4)
    assert cost.edited > 1.01 * cost.perplexity
    assert cost.control is not None
    assert cost.changed == 1
    held_out = set(corpus.split("heldout").tolist())
    assert {d for b in batches for d in b.document.tolist()} <= held_out


@pytest.mark.parametrize("tokens", [1, 2, 63, 700, 10**9])
def test_so_many_held_out_tokens_are_read_as_are_asked_for(lm, tiny_corpus, tokens):
    corpus = Corpus.open(tiny_corpus)
    everything = held_out_batches(lm, corpus, 10**9, 0)
    batches = held_out_batches(lm, corpus, tokens, 0)

    def predictions(batch):
        scored = batch.scored_on(torch.device("cpu"))[2]
        return batch.positions[:, :-1][scored].tolist()

    read = [position for batch in batches for position in predictions(batch)]
    known = {position for batch in everything for position in predictions(batch)}
    assert len(read) == len(set(read)) == min(tokens, len(known))
    assert set(read) <= known
    if tokens < 10:
        assert perplexity_cost(lm, corpus, [Ablate(3)], tokens=tokens).tokens == tokens


# -- how strong


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([], 0),
        ([1, 2], 0),
        ([1, 2, 3, 4], 0),
        ([1, 1, 1, 1, 1], 2 / 3),
        ([1, 2, 3, 1, 2, 3], 1 / 4),
    ],
)
def test_repetition_by_hand(tokens, share):
    assert repetition(tokens) == pytest.approx(share)


def test_the_strongest_edit_is_the_last_step_before_the_text_repeats(lm):
    ids = lm.encode(TEXT)
    plain = repetition(lm.write(ids, 30, 0.0, 0)[0, ids.shape[1] :].tolist())
    found = set()
    for prototype in range(0, 60, 12):
        edit = strongest(lm, TEXT, Clamp(prototype, 1.0), generate=30)
        written = steer(lm, TEXT, [edit], generate=30, draws=0)
        with lm.edit(edit):
            text = lm.write(ids, 30, 0.0, 0)[0, ids.shape[1] :].tolist()
        assert written.repeated == pytest.approx(repetition(text) - plain)
        assert edit.fraction <= MAX_STRENGTH
        if edit.fraction > MAX_STRENGTH / STRENGTH_STEPS:
            assert written.repeated <= MAX_REPETITION
            assert not written.repeats
        above = Clamp(prototype, edit.fraction + MAX_STRENGTH / STRENGTH_STEPS)
        if above.fraction < MAX_STRENGTH:
            stronger = steer(lm, TEXT, [above], generate=30, draws=0)
            assert stronger.repeats
            assert any("begins to repeat" in line for line in cautions(stronger))
        found.add(edit.fraction)
    assert len(found) > 1


def test_what_an_edited_set_carries(labelled):
    read = steer(labelled, TEXT, [Group(-1.0, category="Even")], generate=0, draws=0)
    assert 0.1 < read.active < 1
    assert not cautions(read)
    everything = frozenset(range(labelled.head.num_prototypes))
    whole = steer(labelled, TEXT, [Group(-1.0, prototypes=everything)], generate=0, draws=0)
    assert whole.active == pytest.approx(1.0)
    used = {use.id for step in labelled.explain(TEXT) for use in step.prototypes}
    idle = steer(labelled, TEXT, [Group(-1.0, prototypes=everything - used)], generate=0, draws=0)
    assert idle.active == 0
    assert "hardly active here" in cautions(idle)[0]
    assert steer(labelled, TEXT, [Clamp(3, 0.2)], generate=0, draws=0).active is None


# -- bad input


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"edits": []}, "no edit"),
        ({"edits": [Ablate(10_000)]}, "no prototype 10000: expected 0 to 191"),
        ({"prompt": ""}, "empty"),
        ({"prompt": "word " * 5000}, "shorten it"),
        ({"draws": -1}, "draws of the control is -1"),
        ({"prompt": "a", "generate": 0}, "one token"),
        ({"generate": -1}, "tokens to generate is -1"),
    ],
)
def test_steer_refuses(lm, change, words):
    arguments = {"prompt": TEXT, "edits": [Ablate(3)]} | change
    with pytest.raises(InputError) as refused:
        steer(lm, arguments.pop("prompt"), arguments.pop("edits"), **arguments)
    assert words in str(refused.value)
