"""What explain adds for models of prototype mixers, on the terminal, as JSON and on the page."""

import json
import shutil
import subprocess

import pyarrow.parquet as pq
import pytest

import prismlm
from prismlm.pages.trace import page
from prismlm.pages.trace_data import trace_data
from tests.helpers.chain_models import TEXT, chain_model


@pytest.fixture(scope="module")
def model(tiny_corpus, tmp_path_factory):
    return chain_model(tiny_corpus, tmp_path_factory.mktemp("protot"))


@pytest.fixture(scope="module")
def trace(model):
    return prismlm.load(model).explain(TEXT, generate=2)


def test_json_has_the_chains_of_every_position(prism, model, trace):
    result = prism("explain", model, TEXT, "--generate", 2, "--json")
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed == json.loads(json.dumps(trace.to_dict()))
    for position in printed["positions"]:
        assert list(position)[-1] == "chains"
        for chain, use in zip(position["chains"], position["prototypes"], strict=False):
            assert set(chain) == {
                "prototype", "activation", "embedding", "mlps", "mixers", "edit", "channels",
            }  # fmt: skip
            assert chain["prototype"] == use["id"]
            total = chain["embedding"] + sum(chain["mlps"]) + sum(chain["mixers"])
            assert total + chain["edit"] == pytest.approx(use["activation"], abs=1e-5)
            for channel in chain["channels"]:
                assert set(channel) == {
                    "layer", "channel", "half_life", "activation_part", "contribution", "share",
                    "tokens",
                }  # fmt: skip
                assert all(set(s) == {"position", "token", "part"} for s in channel["tokens"])
    assert printed["positions"][0]["chains"][0]["channels"] == []
    assert len(printed["positions"][3]["chains"][0]["channels"]) == 3


def test_parquet_is_as_for_other_models(trace, tiny_model, tmp_path):
    trace.to_parquet(tmp_path / "own.parquet")
    prismlm.load(tiny_model).explain(TEXT).to_parquet(tmp_path / "other.parquet")
    columns = [pq.read_schema(tmp_path / f"{name}.parquet").names for name in ("own", "other")]
    assert columns[0] == columns[1]


def test_the_page_holds_the_chains(trace, tiny_model):
    for shown, step in zip(trace_data(trace)["steps"], trace, strict=True):
        assert len(shown["chains"]) == min(3, len(step.prototypes))
        for one, chain in zip(shown["chains"], step.chains, strict=True):
            assert sum(one["parts"]) == pytest.approx(chain.activation, abs=1e-5)
            assert [c[:2] for c in one["channels"]] == [
                [use.layer, use.channel] for use in chain.channels
            ]
    other = prismlm.load(tiny_model).explain(TEXT)
    assert all("chains" not in step for step in trace_data(other)["steps"])


@pytest.mark.slow
def test_in_a_browser(trace, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page([trace]), encoding="utf-8")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "this test needs chromium"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command = [chromium, *flags, f"--user-data-dir={tmp_path / 'user'}", "--dump-dom"]
    dom = subprocess.run(
        [*command, path.as_uri()], capture_output=True, encoding="utf-8", check=True, timeout=60
    )
    # The page opens on the last prediction.
    chain = trace[-1].chains[0]
    assert dom.stdout.count('class="p-chain"') == len(trace[-1].chains)
    for use in chain.channels:
        assert f"layer {use.layer} · channel {use.channel}<small>half-life " in dom.stdout
        for source in use.tokens:
            value = f"{abs(source.part):.3f} at {source.position}</small>"
            assert value in dom.stdout
    assert dom.stdout.count("direct path") == 2
