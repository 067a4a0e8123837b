"""Edits against numbers worked out by hand, and against dense naive edits of the same states."""

import pytest
import torch
from safetensors.torch import save_file

from prismlm import Ablate, Clamp, Controller, Group, Scale
from prismlm.errors import FormatError, InputError
from prismlm.interventions.plan import applied, card_direction, token_directions
from prismlm.interventions.values import META
from prismlm.lens.signatures import signature_ids
from prismlm.models.seam import LogitMap, capture
from tests.helpers.edit_models import (
    STATE,
    WEIGHT,
    Flat,
    dense_activations,
    edit_naive,
    make_head,
    make_model,
    plan,
    small_head,
)

IDS = torch.tensor([[5, 9, 2, 40, 33, 17, 8], [1, 1, 60, 7, 12, 21, 3]])


def apply(z, *edits, head=None, scale=1.0, **options):
    return plan(Flat(WEIGHT, scale), head or small_head(), *edits, **options).apply(z)


# -- by hand


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ([Ablate(0)], [1.8, 4.0]),
        ([Ablate(1)], [3.0, 0.8]),
        ([Scale(0, 3.0)], [5.4, 4.0]),
        # Half as many tokens as dimensions: token 0 is distinctive, and of the two prototypes the
        # first raises it, by the (1, x) that moves others least: 11/4 x = 5/4, with λ added to the
        # 11/4. It gets half of the evidence 7 − 2.
        ([Group(0.5, prototypes={0, 1})], [5.5, 4 + 2.5 * 1.25 / (2.75 + 17e-3 / 8)]),
        ([Group(-1.0, prototypes={0, 1})], [1.8, 0.8]),
        ([Group(-0.5, prototypes={1, 2})], [3.0, 2.4]),
        # Logits 3, 4, 7, −6: the top has the evidence 7 − 2. The signature of 2 is (1, −1, 0, 5),
        # so its card lists token 3 first, at 5: 0.4 · 5 / 5 = 0.4, from α = 0. What it gives tokens
        # 0 and 3 determines it.
        ([Clamp(2, 0.4)], [3.4, 3.6]),
        # Edits act in order.
        ([Clamp(2, 0.4), Scale(2, 2.0)], [3.8, 3.2]),
        ([Scale(2, 2.0), Clamp(2, 0.4)], [3.4, 3.6]),
        ([Controller(())], [3.0, 4.0]),
        # (0.5 − 1) 1.2 (1, 0) + (2 − 1) 1.6 (0, 2); the third is not active.
        ([Controller(((2, 4.0), (1, 2.0), (0, 0.5)))], [2.4, 7.2]),
        ([Controller(((0, 0.5),)), Scale(0, 4.0), Ablate(1)], [4.2, 0.8]),
    ],
)
def test_edits_by_hand(edits, expected):
    torch.testing.assert_close(apply(STATE, *edits), torch.tensor([expected]))


def fitted_head():
    head = small_head()
    head.weights = "fitted"
    return head


@pytest.mark.parametrize(
    ("options", "edits", "expected"),
    [
        # ẑ = 1.2 · (1, 0) + 1.6 · (0, 2)
        ({"only": "prototypes"}, [], [1.2, 3.2]),
        ({"only": "residual"}, [], [1.8, 0.8]),
        ({"only": "prototypes"}, [Ablate(1)], [1.2, 0.0]),
        # Fitted, α = 3 / 1.001 and 4 / 1.001 / 2.
        ({"head": fitted_head()}, [Ablate(0)], [3.0 - 3 / 1.001, 4.0]),
        ({"head": fitted_head()}, [Clamp(2, 0.4)], [3.4, 3.6]),
        # Contribution and top logit both carry the model's own factor.
        ({"scale": 0.25}, [Clamp(2, 0.4)], [3.4, 3.6]),
    ],
)
def test_parts_of_a_state_fitted_weights_and_a_factor_by_hand(options, edits, expected):
    torch.testing.assert_close(apply(STATE, *edits, **options), torch.tensor([expected]))


def test_a_clamp_counts_the_bias_in_the_top_logit():
    model = Flat(WEIGHT)
    model.lm_head.bias = torch.nn.Parameter(torch.tensor([0.0, 0.0, 4.0, 0.0]))
    clamp = plan(model, small_head(), Clamp(2, 0.4), logit_map=LogitMap(bias=True))
    # Logits 3, 4, 11, −6: the top has the evidence 8.
    torch.testing.assert_close(clamp.apply(STATE), torch.tensor([[3.64, 3.36]]))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # Orthogonal rows: what the card does not list, and what p lowers, is left out.
        ([0, 1, 2], [2.0, 0.0, 0.5, 0.0]),
        # No listed token gets more than the first.
        ([0, 3], [2.0, 0.0, 0.0, 2.0]),
        ([1, 0], [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_card_directions_by_hand(tokens, expected):
    direction = card_direction(torch.eye(4), torch.tensor([2.0, -1.0, 0.5, 3.0]), tokens)
    torch.testing.assert_close(direction, torch.tensor(expected))


def test_a_card_direction_moves_other_logits_least():
    generator = torch.Generator().manual_seed(0)
    weight, prototype = (torch.randn(*s, generator=generator) for s in ((300, 40), (40,)))
    listed = (weight @ prototype).topk(8).indices.tolist()
    moved, full = weight @ card_direction(weight, prototype, listed), weight @ prototype
    torch.testing.assert_close(moved[listed], full[listed], atol=1e-3, rtol=1e-3)
    assert moved.square().mean() < 0.7 * full.square().mean()
    # Any other direction with the same logits of the listed tokens moves the others more.
    free = torch.linalg.svd(weight[listed])[2][8:]
    for _ in range(5):
        other = moved + weight @ (0.1 * torch.randn(32, generator=generator) @ free)
        torch.testing.assert_close(other[listed], moved[listed], atol=1e-3, rtol=1e-3)
        assert other.square().mean() > moved.square().mean()


def test_a_group_gives_its_tokens_a_share_of_the_top_evidence():
    generator = torch.Generator().manual_seed(4)
    weight, head = torch.randn(90, 24, generator=generator), make_head()
    z = torch.randn(60, head.width, generator=generator)
    group = plan(Flat(weight), head, Group(0.3, prototypes=range(3, 6)))
    tokens, members = group.edits[0].tokens, head.prototypes[3:6]
    assert 3 * 10 >= len(tokens) > 10
    before, _ = dense_activations(head, z)
    direction = before[:, 3:6] @ token_directions(weight, members, tokens)
    raised = (direction @ weight[tokens].T).max(1).values > 0
    assert 0 < int(raised.sum()) < len(z)
    logits, edited = z @ weight.T, group.apply(z)
    most = ((edited - z) @ weight[tokens].T).max(1).values
    evidence = logits.max(1).values - logits.mean(1)
    torch.testing.assert_close(most[raised], 0.3 * evidence[raised], atol=1e-4, rtol=1e-4)
    assert torch.equal(edited[~raised], z[~raised])
    # Fewer tokens than dimensions get what the prototypes give them, and others less than that.
    tokens = tokens[:12]
    moved, full = token_directions(weight, members, tokens) @ weight.T, members @ weight.T
    torch.testing.assert_close(moved[:, tokens], full[:, tokens], atol=1e-4, rtol=1e-4)
    assert moved.square().mean() < 0.8 * full.square().mean()


# -- against dense edits


def states(model):
    with torch.no_grad(), capture(model) as captured:
        model(input_ids=IDS)
    return captured.z.flatten(0, 1)


def test_logits_against_dense_edits():
    model, head = make_model("gpt2"), make_head()
    weight, z = model.get_output_embeddings().weight, states(model)
    before, _ = dense_activations(head, z)
    logits = z @ weight.T
    scales = {3: 0.0, 11: 2.5, 25: 0.3, 24: 5.0}
    controller = Controller(tuple(scales.items()))
    edits = plan(model, head, Ablate(7), controller, Scale(11, 2.5), Clamp(4, 0.3))
    (listed,) = signature_ids(edits.lm, [4])
    gain = (weight @ head.prototypes[4])[listed[0]]
    clamped = 0.3 * (logits.max(-1).values - logits.mean(-1)) / gain
    after = before.clone()
    after[:, 7] = 0
    for prototype, scale in [*scales.items(), (11, 2.5)]:
        after[:, prototype] *= scale
    direction = card_direction(weight, head.prototypes[4], listed)
    expected = edit_naive(z, head.prototypes, before, after)
    expected = (expected + (clamped - before[:, 4])[:, None] * direction) @ weight.T
    with torch.no_grad(), applied(model, edits):
        actual = model(input_ids=IDS).logits.flatten(0, 1)
    assert (actual - logits).abs().max() > 1
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "edit"),
    [(torch.float32, Scale(3, 1.0)), (torch.bfloat16, Group(0.0, prototypes={1, 2, 3}))],
)
def test_edits_without_effect_change_no_bit(dtype, edit):
    model = make_model().to(dtype)
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        with applied(model, plan(model, make_head(), edit)):
            edited = model(input_ids=IDS).logits
    assert torch.equal(plain.view(torch.uint8), edited.view(torch.uint8))


def test_half_precision_is_edited_in_float32_and_rounded_once():
    model, head = make_model().bfloat16(), make_head()
    z = states(model)
    before, routing = dense_activations(head, z.float())
    prototype = int(routing.indices[0, 0])
    after = before.clone()
    after[:, prototype] = 0
    active = before[:, prototype] > 0
    expected = edit_naive(z.float(), head.prototypes, before, after).bfloat16()
    edited = plan(model, head, Ablate(prototype)).apply(z)
    assert edited.dtype == torch.bfloat16
    torch.testing.assert_close(edited[active], expected[active], atol=0, rtol=2**-8)
    assert torch.equal(edited[~active], z[~active])


# -- bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: apply(STATE, Scale(1.5, 2.0)), "no prototype 1.5"),
        (lambda: apply(STATE, Group(1.0, category="law")), "no lens"),
        (lambda: apply(STATE, "Ablate"), "not an edit"),
        (lambda: apply(STATE, Ablate(0), only="residual"), "no prototypes to edit"),
        (lambda: Scale(0, -0.1), "0 or more"),
        (lambda: Clamp(0, 0.0), "use Ablate"),
        (lambda: Group(-1.2, category="law"), r"−1 \(taken out\) to 1"),
        (lambda: Group(0.5), "exactly one"),
        (lambda: Controller([(3, float("nan"))]), "scale of prototype 3 is nan.*0 or more"),
        (lambda: Controller([(3, 1.0), (3, 2.0)]), "two scales"),
    ],
)
def test_edits_that_are_invalid_or_do_not_fit_the_model_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
    # So is the clamp of a prototype that raises nothing.
    head = small_head()
    head.prototypes[1] = torch.tensor([0.0, 0.0])
    with pytest.raises(InputError, match=r"prototype 1 cannot be clamped.* its card"):
        apply(STATE, Clamp(1, 0.5), head=head)


# -- controllers as files


def test_file_gives_back_the_same(tmp_path):
    path = tmp_path / "controller.safetensors"
    one = Controller([(7, 2.0), (3, 0.5)], "abc", "answers", {"task": "t.jsonl", "examples": 400})
    one.save(path)
    read = Controller.load(path)
    assert (read, hash(read), read.made) == (one, hash(one), one.made)
    assert read.scales == ((3, 0.5), (7, 2.0))


COLUMNS = {"prototypes": torch.tensor([1]), "scales": torch.tensor([1.0])}
NEGATIVE = COLUMNS | {"scales": torch.tensor([-1.0])}
VERSION_2 = '{"format_version": 2}'
VERSION_1 = '{"format_version": 1, "head": "", "description": "", "made": {}}'


@pytest.mark.parametrize(
    ("content", "meta", "message"),
    [
        (None, None, r"is not a controller .*No such file"),
        (COLUMNS, None, "is not a controller"),
        (COLUMNS, {META: VERSION_2}, "format version 2; this prismlm reads 1"),
        (NEGATIVE, {META: VERSION_1}, r"not a controller.*scale of prototype 1"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path, content, meta, message):
    path = tmp_path / "controller.safetensors"
    if content is not None:
        save_file(content, path, metadata=meta)
    with pytest.raises(FormatError, match=message):
        Controller.load(path)
