import json

import pytest

from tests.helpers.glue_rows import save_glue_model, write_toy


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_glue_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("data"), rows=32)


def test_a_study_is_made_printed_and_kept(prism, model, data, tmp_path):
    out = tmp_path / "out"
    asked = ("eval", "glue", model, "--tasks", "rte,sst2", "--data", data, "--out", out)
    asked += ("--seeds", "0", "--epochs", "1", "--limit", "16", "--learning-rate", "1e-3")
    made = prism(*asked, "--json")
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert found == json.loads((out / "glue.json").read_text())
    assert [row["title"] for row in found["tasks"]] == ["SST-2", "RTE"]
    assert found["rate_from"] == "given"
    assert (out / "predictions" / "0" / "RTE.tsv").is_file()
    again = prism(*asked)
    assert again.returncode == 0, again.stderr
    assert "SST-2, seed 0: " not in again.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "sst"], ["is 'sst': expected 'cola'", "Did you mean 'sst2'"]),
        (["--tasks", "cola"], ["no cola_train.parquet", "nor cola_train_subset.parquet"]),
        (["--tasks", "rte", "--learning-rate", "1e-3", "--limit", "0"], ["'--limit'"]),
        (["--warmup", "2"], ["'--warmup'"]),
        (["--seeds", "0,x"], ["--seeds is '0,x'", "such as 0,1,2"]),
        (["--search"], ["mnli_train"]),
        (["--search", "--tasks", "rte"], ["--search chooses", "leave out --tasks"]),
        (["--search", "--warmup", "0.1"], ["--search chooses"]),
    ],
)
def test_bad_input_is_refused(refused, model, data, tmp_path, arguments, words):
    out = tmp_path / "out"
    message = refused("eval", "glue", model, "--data", data, "--out", out, *arguments)
    assert all(word in message for word in words), message
    assert not out.exists()
