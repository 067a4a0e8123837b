"""Controllers by numbers worked out by hand, their files, and what is refused."""

import pytest
import torch
from safetensors.torch import save_file

import prismlm
from prismlm import Ablate, Controller, Scale
from prismlm.errors import FormatError, InputError
from prismlm.interventions.plan import applied
from prismlm.interventions.values import META
from prismlm.lens.layout import prototypes_fingerprint
from tests.helpers.edit_models import (
    STATE,
    WEIGHT,
    Flat,
    dense_activations,
    make_head,
    make_model,
    plan,
    small_head,
)


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ((), [3.0, 4.0]),
        ([(0, 1.0), (1, 1.0)], [3.0, 4.0]),
        ([(0, 0.5)], [2.4, 4.0]),
        # (0.5 − 1) 1.2 (1, 0) + (2 − 1) 1.6 (0, 2); the third is not active.
        ([(2, 4.0), (1, 2.0), (0, 0.5)], [2.4, 7.2]),
        ([(0, 0.0), (1, 0.0)], [1.8, 0.8]),
    ],
)
def test_states_and_logits_change_by_the_named_amounts(scales, expected):
    model = Flat(WEIGHT, 0.5)
    after = plan(model, small_head(), Controller(tuple(scales))).apply(STATE)
    torch.testing.assert_close(after, torch.tensor([expected]))
    torch.testing.assert_close(model(after)[0, 3].item(), 0.5 * (2 * expected[0] - 3 * expected[1]))


def test_logits_of_a_model_change_by_the_sum_of_scaled_contributions():
    model, head = make_model(), make_head()
    ids = torch.tensor([[5, 9, 2, 40, 33, 17, 8]])
    seen = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    plain = model(input_ids=ids).logits[0]
    handle.remove()
    scales = {3: 0.0, 11: 2.5, 25: 0.3, 24: 5.0}
    with applied(model, plan(model, head, Controller(tuple(scales.items())))):
        edited = model(input_ids=ids).logits[0]
    alpha, _ = dense_activations(head, seen[0][0])
    change = sum((s - 1) * alpha[:, i, None] * head.prototypes[i] for i, s in scales.items())
    assert change.abs().max() > 0.1
    torch.testing.assert_close(
        edited - plain, change @ model.lm_head.weight.T, atol=2e-4, rtol=1e-4
    )


def test_acts_in_order_with_other_edits():
    model, head = Flat(WEIGHT), small_head()
    both = plan(model, head, Controller(((0, 0.5),)), Scale(0, 4.0), Ablate(1)).apply(STATE)
    torch.testing.assert_close(both, torch.tensor([[3 + 1.2, 0.8]]))


def test_file_gives_back_the_same(tmp_path):
    path = tmp_path / "controller.safetensors"
    made = {"task": "t.jsonl", "examples": 400}
    one = prismlm.Controller([(7, 2.0), (3, 0.5)], "abc", "answers", made)
    one.save(path)
    read = Controller.load(path)
    assert read == one
    assert read.scales == ((3, 0.5), (7, 2.0))
    assert read.made == made
    assert hash(read) == hash(one)
    Controller(()).save(path)
    assert Controller.load(str(path)).scales == ()


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ("3", "scales is '3'"),
        ([3], "pair of scales is 3"),
        ([(3,)], r"pair of scales is \(3,\)"),
        ([(-1, 1.0)], "prototype is -1"),
        ([(1.5, 1.0)], "prototype is 1.5"),
        ([(3, -0.1)], "scale of prototype 3 is -0.1.*0 or more"),
        ([(3, float("nan"))], "scale of prototype 3"),
        ([(3, float("inf"))], "scale of prototype 3"),
        ([(3, 1.0), (3, 2.0)], "prototype 3 has two scales"),
    ],
)
def test_invalid_scales_are_refused(scales, message):
    with pytest.raises(InputError, match=message):
        Controller(scales)


def test_another_head_is_refused_by_name():
    model, head = Flat(WEIGHT), small_head()
    right = Controller(((0, 0.5),), prototypes_fingerprint(head), "mine")
    assert plan(model, head, right).edits
    wrong = Controller(((0, 0.5),), "0123456789abcdef", "mine")
    with pytest.raises(InputError, match="controller 'mine' was made for the prototype head 01234"):
        plan(model, head, wrong)
    with pytest.raises(InputError, match="there is no prototype 3: expected 0 to 2"):
        plan(model, head, Controller(((3, 0.5),)))


def test_files_that_are_none_are_refused(tmp_path):
    path = tmp_path / "controller.safetensors"
    with pytest.raises(FormatError, match=r"is not a controller .*No such file"):
        Controller.load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(FormatError, match="is not a controller"):
        Controller.load(path)
    save_file({"prototypes": torch.tensor([1])}, path)
    with pytest.raises(FormatError, match="is not a controller"):
        Controller.load(path)
    tensors = {"prototypes": torch.tensor([1]), "scales": torch.tensor([1.0])}
    save_file(tensors, path, metadata={META: '{"format_version": 2}'})
    with pytest.raises(FormatError, match="format version 2; this prismlm reads 1"):
        Controller.load(path)
    meta = '{"format_version": 1, "head": "", "description": "", "made": {}}'
    save_file(tensors | {"scales": torch.tensor([-1.0])}, path, metadata={META: meta})
    with pytest.raises(FormatError, match=r"not a controller.*scale of prototype 1"):
        Controller.load(path)
