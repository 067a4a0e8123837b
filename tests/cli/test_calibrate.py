"""prismlm calibrate, and --controller of explain, steer, generate and lm-eval."""

import json

import pytest

import prismlm
from prismlm.explain.controlled import compare_answers
from prismlm.interventions.calibration import calibrate, read_examples

TEXT = "The patient was given a dose of the drug, and the court"


@pytest.fixture(scope="module")
def lm(tiny_model):
    return prismlm.load(tiny_model)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Texts to prefer that end in ten ways, above others that do not."""
    path = tmp_path_factory.mktemp("task") / "endings.jsonl"
    starts = ["The court", "A child", "The drug", "One theory", "The river", "Her mother"]
    rows = [
        {"prompt": start, "chosen": f"of the {n}", "rejected": f"and then {n}"}
        for start in starts
        for n in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def strong(tmp_path_factory, lm):
    """A controller that changes the answer to TEXT."""
    routing = lm.explain(TEXT)[-1].prototypes
    scales = tuple((use.id, 0.0) for use in routing[:3])
    path = tmp_path_factory.mktemp("controller") / "strong.safetensors"
    prismlm.Controller(scales, description="no leading ones").save(path)
    return path


def test_a_controller_is_written_and_described(document, prism, tiny_model, lm, task, tmp_path):
    out = tmp_path / "c.safetensors"
    command = ("calibrate", tiny_model, "--task", task, "--out", out)
    value = document(*command)
    expected = calibrate(lm, read_examples(task), description=task.name)
    assert value == {"model": str(tiny_model), "task": str(task)} | json.loads(
        json.dumps(expected.to_dict())
    )
    written = prismlm.Controller.load(out)
    assert written == expected.controller
    assert written.description == "endings.jsonl"
    shown = prism(*command, "--test", task, "--overwrite").stdout
    assert "right on 36 other examples" in shown


def test_bad_input_is_named(refused, tiny_model, task, tmp_path):
    out = tmp_path / "c.safetensors"
    assert "there is no file" in refused("calibrate", tiny_model, "--task", out, "--out", out)
    wrong = ("--task", task, "--out", tmp_path / "c.bin")
    assert "ends with .safetensors" in refused("calibrate", tiny_model, *wrong)
    assert "there is no controller" in refused("explain", tiny_model, TEXT, "--controller", out)
    prismlm.Controller(((0, 0.5),), "0123456789").save(out)
    for command in ("explain", "steer", "generate"):
        message = refused(command, tiny_model, TEXT, "--controller", out)
        assert "was made for the prototype head 01234567" in message
    both = ("--controller", out, "--prototype", 7)
    assert "--controller has its own" in refused("steer", tiny_model, TEXT, *both)


def test_explain_says_which_prototypes_moved_the_answer(document, prism, tiny_model, lm, strong):
    command = ("explain", tiny_model, TEXT, "--controller", strong, "--generate", 5)
    value = document(*command)["controller"]
    controller = prismlm.Controller.load(strong)
    found = compare_answers(lm, TEXT, controller, 5)
    assert value == json.loads(json.dumps(found.to_dict()))
    assert found.position is not None
    assert found.without != found.with_it
    assert found.gained > found.gap > 0
    first = found.moves[0]
    assert first.scale == 0
    assert first.contexts
    assert sum(move.gained for move in found.moves) == pytest.approx(found.gained)
    shown = prism(*command).stdout
    assert f"#{first.prototype}" in shown
    assert "turned prototypes give" in shown


def test_moves_are_the_change_of_the_gap(lm, strong):
    controller = prismlm.Controller.load(strong)
    found = compare_answers(lm, TEXT, controller)
    ids = lm.encode(TEXT)
    plain = lm.model(input_ids=ids).logits[0, -1]
    with lm.edit(controller):
        edited = lm.model(input_ids=ids).logits[0, -1]
    x, y = plain.argmax(), edited.argmax()
    assert found.gap == pytest.approx(float(plain[x] - plain[y]), abs=1e-3)
    change = (edited[y] - edited[x]) - (plain[y] - plain[x])
    assert found.gained == pytest.approx(float(change), abs=1e-3)


def test_a_text_that_fills_the_context_is_read(prism, tiny_model, lm, strong):
    text = "The court of the drug " * lm.context_length
    while len(lm.tokenizer(text).input_ids) > lm.context_length:
        text = text.rsplit(maxsplit=1)[0]
    assert lm.encode(text).shape[1] == lm.context_length
    prism("explain", tiny_model, text, "--controller", strong)
    controller = prismlm.Controller.load(strong)
    found = compare_answers(lm, text, controller, temperature=5.0)
    top = lm.model(input_ids=lm.encode(text)).logits[0, -1].argmax()
    assert found.without == lm.words([int(top)])


def test_an_answer_that_stays(prism, tiny_model, lm, tmp_path):
    active = {use.id for use in lm.explain(TEXT)[-1].prototypes}
    idle = next(i for i in range(lm.head.num_prototypes) if i not in active)
    out = tmp_path / "c.safetensors"
    prismlm.Controller(((idle, 0.0),)).save(out)
    shown = prism("explain", tiny_model, TEXT, "--controller", out).stdout
    assert "the answer is as without it" in " ".join(shown.split())


def test_generate_and_steer_write_under_it(document, prism, tiny_model, lm, strong):
    with lm.edit(prismlm.Controller.load(strong)):
        expected = lm.generate(TEXT, tokens=5)
    options = (tiny_model, TEXT, "--controller", strong)
    assert document("generate", *options, "--tokens", 5)["text"] == expected
    value = document("steer", *options, "--generate", 5, "--heldout", 0)
    assert value["text"] == expected
    assert value["edit"] == {"kind": "controller", "prototypes": 3, "of": "no leading ones"}
