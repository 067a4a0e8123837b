import pytest
import torch

from prismlm.errors import InputError
from prismlm.training import LossWeights
from tests.helpers.tiny_head import batch, make


def test_logits_and_ce_are_those_of_the_plain_model():
    model, inputs = make(), batch()
    output = model(**inputs)
    plain = model.model(input_ids=inputs["input_ids"], labels=inputs["labels"])
    torch.testing.assert_close(output.logits, plain.logits, rtol=0, atol=1e-6)
    torch.testing.assert_close(output.losses["ce"], plain.loss.detach())
    assert output.past_key_values is None
    assert output.routing.indices.shape == (20, 3)


def test_the_loss_is_the_weighted_sum_of_its_parts():
    weights = LossWeights(
        prototype_pull=0.3, point_pull=0.5, residual=0.7, diversity=0.9, prototype_only_kl=0.0
    )
    model = make(weights=weights)
    model.loss_scale = 0.25
    output = model(**batch())
    parts = output.losses
    assert list(parts) == ["ce", "prototype_pull", "point_pull", "residual", "diversity"]
    expected = parts["ce"] + 0.25 * (
        0.3 * parts["prototype_pull"]
        + 0.5 * parts["point_pull"]
        + 0.7 * parts["residual"]
        + 0.9 * parts["diversity"]
    )
    torch.testing.assert_close(output.loss.detach(), expected)


def test_the_head_is_left_out_until_it_is_initialised():
    model = make(initialised=False)
    output = model(**batch())
    assert output.routing is None
    assert list(output.losses) == ["ce"]
    assert output.loss.item() == output.losses["ce"].item()
    model.initialised = True
    assert model(**batch()).routing is not None


@pytest.mark.parametrize("detach", [True, False])
def test_only_a_head_that_is_not_detached_reaches_the_model(detach):
    weights = LossWeights(prototype_only_ce=1.0, prototype_only_kl=1.0)
    model = make(detach=detach, weights=weights)
    assert not model(**batch()).losses["ce"].requires_grad
    model(**batch()).loss.backward()
    plain = make()
    plain.model(input_ids=batch()["input_ids"], labels=batch()["labels"]).loss.backward()
    pairs = zip(model.model.parameters(), plain.model.parameters(), strict=True)
    same = all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert same == detach
    assert model.prototype_head.prototypes.grad.abs().sum() > 0


def test_padding_moves_no_prototype_and_no_loss():
    model, inputs = make(detach=True), batch()
    inputs["token_mask"][:, 6:] = False
    inputs["labels"] = inputs["labels"].masked_fill(~inputs["token_mask"], -100)
    first = model(**inputs).losses
    inputs["input_ids"] = inputs["input_ids"].clone()
    inputs["input_ids"][:, 6:] = 7
    second = model(**inputs).losses
    for name, value in first.items():
        torch.testing.assert_close(value, second[name])


def test_fewer_tokens_than_prototypes_per_token_are_routed_and_none_are_refused():
    model = make()
    assert model(**{k: v[:1, :2] for k, v in batch().items()}).loss.isfinite()
    for empty in (
        {k: v[:0] for k, v in batch().items()},
        {k: v[:, :0] for k, v in batch().items()},
    ):
        with pytest.raises(InputError, match="expected at least one token"):
            model(**empty)


def test_packed_documents_do_not_see_each_other():
    model, inputs = make().eval(), batch(1, 12)
    inputs["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)])[None]
    before = model(**inputs).logits
    inputs["input_ids"] = inputs["input_ids"].clone()
    inputs["input_ids"][0, :5] = torch.tensor([9, 8, 7, 6, 5])
    after = model(**inputs).logits
    torch.testing.assert_close(after[0, 5:], before[0, 5:], rtol=0, atol=1e-6)
    assert (after[0, :5] - before[0, :5]).abs().max() > 1e-3
    alone = model(input_ids=inputs["input_ids"][:, 5:]).logits
    torch.testing.assert_close(after[0, 5:], alone[0], rtol=0, atol=1e-5)


def test_no_draw_from_the_global_generator():
    model, inputs = make().eval(), batch()
    state = torch.get_rng_state()
    model(**inputs).loss.backward()
    assert torch.equal(torch.get_rng_state(), state)
