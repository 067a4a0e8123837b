"""Controllers as files, and what is refused; what they do is in test_values.py."""

import pytest
import torch
from safetensors.torch import save_file

from prismlm import Controller
from prismlm.errors import FormatError, InputError
from prismlm.interventions.values import META
from prismlm.lens.layout import prototypes_fingerprint
from tests.helpers.edit_models import WEIGHT, Flat, plan, small_head


def test_file_gives_back_the_same(tmp_path):
    path = tmp_path / "controller.safetensors"
    made = {"task": "t.jsonl", "examples": 400}
    one = Controller([(7, 2.0), (3, 0.5)], "abc", "answers", made)
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


COLUMNS = {"prototypes": torch.tensor([1]), "scales": torch.tensor([1.0])}
NEGATIVE = COLUMNS | {"scales": torch.tensor([-1.0])}
VERSION_2 = '{"format_version": 2}'
VERSION_1 = '{"format_version": 1, "head": "", "description": "", "made": {}}'


@pytest.mark.parametrize(
    ("content", "meta", "message"),
    [
        (None, None, r"is not a controller .*No such file"),
        (b"nonsense", None, "is not a controller"),
        (COLUMNS, None, "is not a controller"),
        (COLUMNS, {META: VERSION_2}, "format version 2; this prismlm reads 1"),
        (NEGATIVE, {META: VERSION_1}, r"not a controller.*scale of prototype 1"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path, content, meta, message):
    path = tmp_path / "controller.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save_file(content, path, metadata=meta)
    with pytest.raises(FormatError, match=message):
        Controller.load(path)
