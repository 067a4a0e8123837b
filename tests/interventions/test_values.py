"""Edits against numbers worked out by hand, and against dense naive edits of the same states."""

import pytest
import torch

from prismlm import Ablate, Clamp, Group, Scale
from prismlm.errors import InputError
from prismlm.interventions.plan import applied, card_direction, token_directions
from prismlm.models.seam import LogitMap, capture
from tests.helpers.edit_models import (
    Flat,
    dense_activations,
    make_head,
    make_model,
    plan,
)
from tests.helpers.naive_edits import edit_naive

IDS = torch.tensor([[5, 9, 2, 40, 33, 17, 8], [1, 1, 60, 7, 12, 21, 3]])
WEIGHT = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, -3.0]])
STATE = torch.tensor([[3.0, 4.0]])


def hand_head(per_token=2):
    """τ = 2 and prototypes (1, 0), (0, 2), (1, −1): at (3, 4), α = 1.2, 1.6, 0."""
    head = make_head(2, 3, per_token, scale=2.0)
    head.prototypes.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, -1.0]]))
    return head


def edited(z, *edits, head=None, scale=1.0, **options):
    return plan(Flat(WEIGHT, scale), head or hand_head(), *edits, **options).apply(z)


# -- by hand


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (Ablate(0), [1.8, 4.0]),
        (Ablate(1), [3.0, 0.8]),
        (Scale(0, 3.0), [5.4, 4.0]),
        (Scale(0, 0.0), [1.8, 4.0]),
        # Of half as many tokens as dimensions, token 0 is told, and of the two prototypes the first
        # raises it, by the (1, x) that moves others least: 11/4 x = 5/4, and λ beside the 11/4. It
        # gets half of the evidence 7 − 2.
        (Group(0.5, prototypes={0, 1}), [5.5, 4 + 2.5 * 1.25 / (2.75 + 17e-3 / 8)]),
        (Group(-1.0, prototypes={0, 1}), [1.8, 0.8]),
        (Group(-0.5, prototypes={1, 2}), [3.0, 2.4]),
        # Logits 3, 4, 7, −6: the top has the evidence 7 − 2. The signature of 2 is (1, −1, 0, 5),
        # so that its card lists token 3 first, at 5: 0.4 · 5 / 5 = 0.4, from α = 0. What it gives
        # tokens 0 and 3 makes it whole.
        (Clamp(2, 0.4), [3.4, 3.6]),
    ],
)
def test_by_hand(edit, expected):
    torch.testing.assert_close(edited(STATE, edit), torch.tensor([expected]))


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        # Fitted, α = 3 / 1.001 and 4 / 1.001 / 2.
        (Ablate(0), [3.0 - 3 / 1.001, 4.0]),
        (Scale(1, 2.0), [3.0, 4.0 + 4 / 1.001]),
        (Clamp(2, 0.4), [3.4, 3.6]),
    ],
)
def test_fitted_weights_by_hand(edit, expected):
    head = hand_head()
    head.weights = "fitted"
    torch.testing.assert_close(edited(STATE, edit, head=head), torch.tensor([expected]))


def test_modes_by_hand():
    # ẑ = 1.2 · (1, 0) + 1.6 · (0, 2)
    mixture = torch.tensor([[1.2, 3.2]])
    torch.testing.assert_close(edited(STATE, only="prototypes"), mixture)
    torch.testing.assert_close(edited(STATE, only="residual"), STATE - mixture)
    torch.testing.assert_close(
        edited(STATE, Ablate(1), only="prototypes"), torch.tensor([[1.2, 0.0]])
    )


def test_edits_act_in_order():
    # Clamp to 0.4 and double that; or double, and clamp to 0.4 whatever was there.
    assert edited(STATE, Clamp(2, 0.4), Scale(2, 2.0))[0, 0] == pytest.approx(3.8)
    assert edited(STATE, Scale(2, 2.0), Clamp(2, 0.4))[0, 0] == pytest.approx(3.4)
    assert edited(STATE, Ablate(0), Ablate(0))[0, 0] == pytest.approx(1.8)


def test_a_clamp_counts_what_the_model_does_after_its_embedding():
    """Contribution and top logit both carry the model's own factor; a bias is in the latter."""
    torch.testing.assert_close(edited(STATE, Clamp(2, 0.4), scale=0.25), torch.tensor([[3.4, 3.6]]))
    model = Flat(WEIGHT)
    model.lm_head.bias = torch.nn.Parameter(torch.tensor([0.0, 0.0, 4.0, 0.0]))
    made = plan(model, hand_head(), Clamp(2, 0.4), logit_map=LogitMap(bias=True))
    # Logits 3, 4, 11, −6: the top has the evidence 8.
    torch.testing.assert_close(made.apply(STATE), torch.tensor([[3.64, 3.36]]))


def test_the_part_that_a_card_shows():
    # Orthogonal rows: what the card does not list, and what p lowers, is left out.
    weight, prototype = torch.eye(4), torch.tensor([2.0, -1.0, 0.5, 3.0])
    part = card_direction(weight, prototype, [0, 1, 2])
    torch.testing.assert_close(part, torch.tensor([2.0, 0.0, 0.5, 0.0]))
    # None of the listed tokens is given more than the first.
    part = card_direction(weight, prototype, [0, 3])
    torch.testing.assert_close(part, torch.tensor([2.0, 0.0, 0.0, 2.0]))
    assert not card_direction(weight, prototype, [1, 0]).any()


def test_the_part_that_a_card_shows_moves_other_logits_least():
    generator = torch.Generator().manual_seed(0)
    weight, prototype = (
        torch.randn(300, 40, generator=generator),
        torch.randn(40, generator=generator),
    )
    listed = (weight @ prototype).topk(8).indices.tolist()
    moved = weight @ card_direction(weight, prototype, listed)
    given = weight @ prototype
    torch.testing.assert_close(moved[listed], given[listed], atol=1e-3, rtol=1e-3)
    assert moved.square().mean() < 0.7 * given.square().mean()
    # Any other direction that keeps what the listed tokens get moves the rest more.
    free = torch.linalg.svd(weight[listed])[2][8:]
    for _ in range(5):
        other = moved + weight @ (0.1 * torch.randn(32, generator=generator) @ free)
        torch.testing.assert_close(other[listed], moved[listed], atol=1e-3, rtol=1e-3)
        assert other.square().mean() > moved.square().mean()


def test_a_group_gives_its_tokens_a_share_of_the_top_evidence():
    generator = torch.Generator().manual_seed(4)
    weight, head = torch.randn(90, 24, generator=generator), make_head()
    z = torch.randn(60, head.width, generator=generator)
    members = range(3, 6)
    made = plan(Flat(weight), head, Group(0.3, prototypes=members))
    told = made.distinctive_tokens(tuple(members))
    assert 3 * 10 >= len(told) > 10
    before, _ = dense_activations(head, z)
    part = token_directions(weight, head.prototypes[3:6], told)
    together = before[:, 3:6] @ part
    moved = (made.apply(z) - z) @ weight.T
    logits = z @ weight.T
    raised = (together @ weight[told].T).max(1).values > 0
    assert 0 < int(raised.sum()) < len(z)
    most = moved[:, told].max(1).values
    evidence = logits.max(1).values - logits.mean(1)
    torch.testing.assert_close(most[raised], 0.3 * evidence[raised], atol=1e-4, rtol=1e-4)
    assert torch.equal(made.apply(z)[~raised], z[~raised])
    # Fewer tokens than dimensions get what the prototypes give them, and others less than that.
    told = told[:12]
    part, whole = (
        token_directions(weight, head.prototypes[3:6], told),
        head.prototypes[3:6] @ weight.T,
    )
    torch.testing.assert_close(part @ weight[told].T, whole[:, told], atol=1e-4, rtol=1e-4)
    assert (part @ weight.T).square().mean() < 0.8 * whole.square().mean()


# -- against dense edits


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_against_dense_edits(family):
    model, head = make_model(family), make_head()
    weight = model.get_output_embeddings().weight
    with torch.no_grad(), capture(model) as seen:
        model(input_ids=IDS)
    z = seen.z.flatten(0, 1)
    before, _ = dense_activations(head, z)
    logits = z @ weight.T
    edits = Ablate(7), Scale(11, 2.5), Clamp(4, 0.3)
    made = plan(model, head, *edits)
    listed = made.card_tokens(4)
    given = (weight @ head.prototypes[4])[listed[0]]
    held = 0.3 * (logits.max(-1).values - logits.mean(-1)) / given
    after = before.clone()
    after[:, 7] = 0
    after[:, 11] *= 2.5
    expected = edit_naive(z, head.prototypes, before, after)
    expected = expected + (held - before[:, 4])[:, None] * card_direction(
        weight, head.prototypes[4], listed
    )
    expected = expected @ weight.T
    with torch.no_grad(), applied(model, made):
        actual = model(input_ids=IDS).logits.flatten(0, 1)
    assert (actual - logits).abs().max() > 1
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-4)


# -- no edit, no change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "edits", [(), (Scale(3, 1.0), Scale(3, 1.0)), (Group(0.0, prototypes={1, 2, 3}),)]
)
def test_what_changes_nothing_changes_no_bit(dtype, edits):
    model, head = make_model().to(dtype), make_head()
    seen = []
    handle = model.get_output_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(args[0])
    )
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        with applied(model, plan(model, head, *edits)):
            inside = model(input_ids=IDS).logits
    handle.remove()
    assert torch.equal(plain.view(torch.uint8), inside.view(torch.uint8))
    assert torch.equal(seen[0].view(torch.uint8), seen[1].view(torch.uint8))


def test_half_precision_is_edited_in_float32_and_rounded_once():
    model, head = make_model().bfloat16(), make_head()
    with torch.no_grad(), capture(model) as seen:
        model(input_ids=IDS)
    z = seen.z.flatten(0, 1)
    before, routing = dense_activations(head, z.float())
    chosen = int(routing.indices[0, 0])
    after = before.clone()
    after[:, chosen] = 0
    expected = edit_naive(z.float(), head.prototypes, before, after)
    expected = torch.where(before[:, chosen, None] > 0, expected.bfloat16(), z)
    result = plan(model, head, Ablate(chosen)).apply(z)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, expected, atol=0, rtol=2**-8)
    inactive = before[:, chosen] == 0
    assert torch.equal(result[inactive], z[inactive])


# -- bad input


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Scale(0, -0.1), "0 or more"),
        (lambda: Scale(0, float("nan")), "finite"),
        (lambda: Scale("4", 1.0), "is '4': expected a whole number"),
        (lambda: Clamp(0, 0.0), "use Ablate"),
        (lambda: Clamp(0, 1.01), "at most 1"),
        (lambda: Group(-1.2, category="law"), "−1 (taken out) to 1"),
        (lambda: Group(float("nan"), category="law"), "−1 (taken out)"),
        (lambda: Group(0.5), "exactly one"),
        (lambda: Group(0.5, category="law", prototypes={1}), "exactly one"),
        (lambda: Group(0.5, prototypes=()), "no prototypes"),
    ],
)
def test_values_refuse(make, words):
    with pytest.raises(InputError) as refused:
        make()
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("edits", "only", "words"),
    [
        ((Ablate(3),), None, "no prototype 3: expected 0 to 2"),
        ((Scale(-1, 2.0),), None, "no prototype -1"),
        ((Group(1.0, prototypes={0, 7}),), None, "no prototype 7"),
        ((Group(1.0, category="law"),), None, "no lens"),
        ((Group(1.0, document="d"),), None, "no document 'd'"),
        (("Ablate",), None, "not an edit"),
        ((Ablate(0),), "residual", "nothing to edit"),
        ((), "prototype", "only is 'prototype'"),
    ],
)
def test_a_plan_refuses(edits, only, words):
    with pytest.raises(InputError) as refused:
        edited(STATE, *edits, only=only)
    assert words in str(refused.value)


def test_a_clamp_is_refused_where_the_prototype_raises_nothing():
    head = hand_head()
    head.prototypes[1] = torch.tensor([0.0, 0.0])
    with pytest.raises(InputError, match=r"prototype 1 cannot be clamped.* its card"):
        edited(STATE, Clamp(1, 0.5), head=head)
