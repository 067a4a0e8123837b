"""prismlm steer, generate, calibrate, suppress and what-if, and what --controller does."""

import json
import shutil

import pytest

import prismlm
from prismlm.corpus import Corpus
from prismlm.explain.what_if import what_if
from prismlm.interventions.calibration import calibrate, read_examples
from prismlm.interventions.steering import compare_answers, steer, strongest
from prismlm.interventions.steering_effects import measure_effects, perplexity_cost
from prismlm.lens.layout import prototypes_fingerprint
from prismlm.probes.results import as_json
from tests.helpers import forked
from tests.helpers.eval_data import write_benchmarks
from tests.helpers.records import write_jsonl

TEXT = "The patient was given a dose of the drug, and the court"
CELL = "The cell is the smallest unit"
CLAMP, STRENGTH = prismlm.Clamp(7, 0.3), ("--strength", 0.3)
SMALL = ("--phrase", "the", "--samples", 16, "--tokens", 8)


# -- steer and generate


def test_json_of_a_text(document, tiny_model, lm):
    command = ("steer", tiny_model, TEXT, "--prototype", 7)
    value = document(*command, *STRENGTH, "--generate", 5, "--draws", 3, "--heldout", 500)
    cost = value.pop("cost")
    about = {"model": str(tiny_model), "lens": "sample", "only": None, "cost_note": ""}
    about["edit"] = {"kind": "clamp", "prototype": 7, "fraction": 0.3}
    assert value == as_json(steer(lm, TEXT, [CLAMP], generate=5, draws=3)) | about
    assert cost["edited"] > cost["perplexity"] > 1
    assert 500 <= cost["tokens"] < 1000
    # Without a strength, the largest without repetition.
    value = document(*command, "--heldout", 0)
    edit = strongest(lm, TEXT, prismlm.Clamp(7, 1.0))
    assert value["edit"]["fraction"] == edit.fraction
    assert value["text"] == steer(lm, TEXT, [edit], draws=0).text


def test_a_file_of_prompts(prism, document, tiny_model, lm, tmp_path):
    prompts = [TEXT, "Once upon a time", "The theory of groups"]
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(prompts) + "\n", encoding="utf-8")
    options = ("--prototype", 7, *STRENGTH, "--draws", 2, "--heldout", 0)
    value = document("steer", tiny_model, "--file", path, *options)
    expected = measure_effects(lm, prompts, [CLAMP], draws=2)
    assert {key: value[key] for key in expected} == as_json(expected)
    assert value["cost"] is None
    shown = prism("steer", tiny_model, "--file", path, *options).stdout
    effect = expected["measures"]["divergence"]
    for figure in (effect["edit"], *effect["difference_interval"], effect["control"]):
        assert f"{figure:+.3f}".replace("-", "−") in shown


def test_a_part_alone(document, tiny_model, tiny_corpus, lm):
    only = "residual"
    options = ("--only", only, "--generate", 4, "--heldout", 500)
    value = document("steer", tiny_model, TEXT, *options)
    cost = perplexity_cost(lm, Corpus.open(tiny_corpus), [], only=only, tokens=500)
    assert (value["edit"], value["only"], value["cost"]) == (None, only, as_json(cost))
    with lm.edit(only=only):
        assert value["text"] == lm.generate(TEXT, tokens=4)
    assert value["unedited"] == lm.generate(TEXT, tokens=4) != value["text"]


def test_the_cost_needs_a_corpus(prism, copy):
    shutil.rmtree(copy / "lens")
    shown = prism("steer", copy, TEXT, "--prototype", 7, *STRENGTH, "--generate", 2).stdout
    assert "cost on held-out text: there is no lens that names a corpus" in shown


def test_what_changes_nothing_is_told(prism, tiny_model, lm, tmp_path):
    trace, out = lm.explain(TEXT), tmp_path / "c.safetensors"
    active = {use.id for step in trace for use in step.prototypes}
    idle = next(i for i in range(lm.head.num_prototypes) if i not in active)
    options = ("--prototype", idle, "--edit", "ablate", "--heldout", 0)
    words = " ".join(prism("steer", tiny_model, TEXT, *options).stdout.split())
    assert "Nothing changed" in words
    assert any(f"#{number}" in words for number in active), words
    prismlm.Controller(((idle, 0.0),)).save(out)
    shown = prism("explain", tiny_model, TEXT, "--controller", out).stdout
    assert "the answer is as without it" in " ".join(shown.split())


def test_generate(prism, document, tiny_model, lm):
    command = ("generate", tiny_model, TEXT, "--tokens", 7)
    assert prism(*command).stdout == lm.generate(TEXT, tokens=7) + "\n"
    value = document(*command, "--temperature", 2)
    assert value["text"] == lm.generate(TEXT, tokens=7, temperature=2.0)
    assert value["prompt"] == TEXT


# -- controllers, calibrate and suppress


@pytest.fixture(scope="module")
def strong(tmp_path_factory, lm):
    """A controller that changes the answer to TEXT."""
    routing = lm.explain(TEXT)[-1].prototypes
    scales = tuple((use.id, 0.0) for use in routing[:3])
    path = tmp_path_factory.mktemp("controller") / "strong.safetensors"
    prismlm.Controller(scales, description="no leading ones").save(path)
    return path


def test_a_controller_is_written_and_described(document, prism, tiny_model, lm, tmp_path):
    starts = ("The court", "A child", "The drug", "One theory", "The river", "Her mother")
    # Texts to prefer end in ten ways, above others that do not.
    rows = [
        {"prompt": start, "chosen": f"of the {n}", "rejected": f"and then {n}"}
        for start in starts
        for n in range(6)
    ]
    task, out = write_jsonl(tmp_path / "endings.jsonl", rows), tmp_path / "c.safetensors"
    command = ("calibrate", tiny_model, "--task", task, "--out", out)
    value = document(*command)
    controller, report = calibrate(lm, read_examples(task), description=task.name)
    assert value == {"model": str(tiny_model), "task": str(task)} | as_json(report)
    written = prismlm.Controller.load(out)
    assert written == controller
    assert written.description == "endings.jsonl"
    shown = prism(*command, "--test", task, "--overwrite").stdout
    assert "right on 36 other examples" in shown


def test_explain_says_which_prototypes_moved_the_answer(document, prism, tiny_model, lm, strong):
    command = ("explain", tiny_model, TEXT, "--controller", strong, "--generate", 5)
    value = document(*command)["controller"]
    controller = prismlm.Controller.load(strong)
    found = compare_answers(lm, TEXT, controller, 5)
    assert value == as_json(found)
    assert found["position"] is not None
    assert found["without"] != found["with_it"]
    assert found["gained"] > found["gap"] > 0
    first = found["moves"][0]
    assert first["scale"] == 0
    assert first["contexts"]
    assert sum(move["gained"] for move in found["moves"]) == pytest.approx(found["gained"])
    shown = prism(*command).stdout
    assert f"#{first['prototype']}" in shown
    assert "turned prototypes give" in shown


def test_moves_are_the_change_of_the_gap(lm, strong):
    controller = prismlm.Controller.load(strong)
    found = compare_answers(lm, TEXT, controller)
    ids = lm.encode(TEXT)
    plain = lm.model(input_ids=ids).logits[0, -1]
    with lm.edit(controller):
        edited = lm.model(input_ids=ids).logits[0, -1]
    x, y = plain.argmax(), edited.argmax()
    assert found["gap"] == pytest.approx(float(plain[x] - plain[y]), abs=1e-3)
    change = (edited[y] - edited[x]) - (plain[y] - plain[x])
    assert found["gained"] == pytest.approx(float(change), abs=1e-3)


def test_generate_and_steer_write_under_it(document, prism, tiny_model, lm, strong):
    with lm.edit(prismlm.Controller.load(strong)):
        expected = lm.generate(TEXT, tokens=5)
    options = (tiny_model, TEXT, "--controller", strong)
    assert document("generate", *options, "--tokens", 5)["text"] == expected
    value = document("steer", *options, "--generate", 5, "--heldout", 0)
    assert value["text"] == expected
    assert value["edit"] == {"kind": "controller", "prototypes": 3, "of": "no leading ones"}


@pytest.fixture(scope="module")
def suppressing(tiny_model, tiny_corpus, tmp_path_factory):
    """The command, with few short texts: the fit is as fast as it has positions."""
    place, corpus = tmp_path_factory.mktemp("suppress"), Corpus.open(tiny_corpus)

    def write(name, split, count, characters):
        rows = [{"text": corpus.text(n)[:characters]} for n in corpus.split(split)[:count].tolist()]
        return write_jsonl(place / name, rows)

    examples = write("examples.jsonl", "train", 32, 300)
    keep = write("keep.jsonl", "heldout", 8, 100)
    return ("suppress", tiny_model, "--examples", examples, "--keep", keep, *SMALL, "--out")


def test_a_controller_is_written_and_tasks_are_asked(prism, tiny_model, suppressing, tmp_path):
    out, tasks = tmp_path / "quiet.safetensors", ("arc_easy", "piqa", "winogrande")
    command = (*suppressing, out, "--target", 0.2, "--max-cost", 100)
    command += ("--questions", 2, "--tasks", ",".join(tasks))
    shown = prism(*command, "--data", write_benchmarks(tmp_path / "data", *tasks)).stdout
    written, lm = prismlm.Controller.load(out), prismlm.load(tiny_model)
    assert written.head == prototypes_fingerprint(lm.head)
    assert written.made["by"] == "suppress"
    with lm.edit(written):
        lm.generate("The", tokens=2)
    words = ("the text has “the”", "Strengths", "random prototypes", "logit bias", *tasks, "mean")
    assert all(word in shown for word in words)


def test_out_of_reach_the_frontier_is_printed(suppressing, tmp_path):
    out = tmp_path / "none.safetensors"
    result = forked.run(*suppressing, out, "--target", 0.2, "--max-cost", 0, "--json")
    assert result.returncode == 2
    assert not out.exists()
    value = json.loads(result.stdout)
    assert (value["chosen"], value["tasks"], value["outcomes"]) == (None, None, [])
    assert [point["weight"] for point in value["frontier"]][:2] == [300, 100]
    assert "nothing was written" in result.stderr


def test_what_if_in_json_and_table(prism, document, tiny_model, lm):
    first = lm.explain(CELL, generate=5).documents(1)[0].doc_id
    command = ("what-if", tiny_model, CELL, "--without", first, "--generate", 5)
    result = what_if(lm, CELL, [first], generate=5)
    about = {"model": str(tiny_model), "lens": "sample", "prompt": CELL}
    assert document(*command) == as_json(result) | about
    shown = prism(*command).stdout
    assert "Without 1 document (" in shown
    assert f"{result.estimates[0].change:+.1f}".replace("-", "−") in shown
    assert "they may not hold" in " ".join(shown.split())
