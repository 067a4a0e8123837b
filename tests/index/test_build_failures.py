"""Signals, full disks, two writers and damaged files: what they leave of an index."""

import json
import os
import random
import signal
import time
from dataclasses import replace

import pytest
import torch

from prismlm.errors import FormatError, InputError, Interrupted, PrismError
from prismlm.index.build import Shard, build_index
from prismlm.index.state import Partial
from tests.helpers.file_limit import limit_files, limit_lifted_after
from tests.helpers.kills import (
    OPTIONS,
    index_in_child,
    make_corpus,
    make_model,
)
from tests.index.test_build import assert_same_lens


@pytest.fixture(autouse=True)
def python_s_own_handler():
    """A shell may have started the tests in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def model(corpus):
    return make_model(corpus)


@pytest.fixture(scope="module")
def straight(corpus, model, tmp_path_factory):
    return build_index(*model, corpus, tmp_path_factory.mktemp("straight") / "lens", OPTIONS)


class StopAfter:
    """A reporter that sends a signal, or raises, when so many advances are made."""

    def __init__(self, advances, act):
        self.left, self.act = advances, act

    def task(self, description, total=None, unit="tokens"):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def advance(self, amount=1):
        self.left -= 1
        if self.left == 0:
            self.act()

    def note(self, text):
        pass


@pytest.mark.parametrize("seed", range(3))
def test_shards_in_any_order_give_the_same_bytes(corpus, model, straight, tmp_path, seed):
    count = 2 + 3 * seed
    order = random.Random(seed).sample(range(count), count)
    out = tmp_path / "lens"
    results = [build_index(*model, corpus, out, OPTIONS, Shard(i, count)) for i in order]
    assert results == [None] * (count - 1) + [out]
    assert_same_lens(straight, out)
    assert [path.name for path in tmp_path.iterdir()] == ["lens"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("advances", [3, 30])
def test_a_signal_saves_and_says_how_to_go_on(corpus, model, tmp_path, number, code, advances):
    out = tmp_path / "lens"
    progress = StopAfter(advances, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted, match="same command again") as stop:
        build_index(*model, corpus, out, OPTIONS, progress=progress)
    assert stop.value.exit_code == code
    assert str(Partial(out).path) in str(stop.value)
    assert not out.exists()
    again = StopAfter(10**9, lambda: None)
    build_index(*model, corpus, out, OPTIONS, progress=again)
    # It did not begin from the start.
    full = StopAfter(10**9, lambda: None)
    build_index(*model, corpus, tmp_path / "full", OPTIONS, progress=full)
    assert again.left > full.left


@pytest.mark.parametrize("size", [200, 20_000])
@pytest.mark.parametrize("advances", [3, 30])
def test_a_disk_that_is_full_keeps_the_last_save(corpus, model, straight, tmp_path, size, advances):
    """The limit on a file's size fails the same writes, in the scan and in writing the lens."""
    out = tmp_path / "lens"
    full = StopAfter(advances, lambda: limit_files(size))
    fails = pytest.raises(PrismError, match=r"could not be written.*same command")
    with limit_lifted_after(), fails:
        build_index(*model, corpus, out, OPTIONS, save_seconds=0, progress=full)
    assert not out.exists()
    partial = Partial(out).path
    assert not [path for path in partial.rglob("*") if path.name.endswith(".tmp")]
    assert not (partial / "lens").exists()
    assert_same_lens(straight, build_index(*model, corpus, out, OPTIONS))


def interrupted(corpus, model, out, **options):
    def stop():
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        build_index(*model, corpus, out, OPTIONS, progress=StopAfter(3, stop), **options)


def test_another_input_is_refused_and_named(corpus, model, straight, tmp_path):
    out = tmp_path / "lens"
    interrupted(corpus, model, out)
    with pytest.raises(InputError, match=r"contexts: 4 → 5.*--overwrite"):
        build_index(*model, corpus, out, replace(OPTIONS, contexts=5))
    other = make_model(corpus, seed=1)
    with pytest.raises(InputError, match=r"model: .* → .*prototypes: "):
        build_index(*other, corpus, out, OPTIONS)
    text = make_corpus(tmp_path / "other", seed=3)
    with pytest.raises(InputError, match="corpus: "):
        build_index(*model, text, out, OPTIONS)
    with pytest.raises(InputError, match="shards: 1 → 2"):
        build_index(*model, corpus, out, OPTIONS, Shard(0, 2))
    with pytest.raises(InputError, match="another tokenizer than the model's"):
        build_index(*model, corpus, out, OPTIONS, tokenizer="0" * 32)
    assert_same_lens(straight, build_index(*model, corpus, out, OPTIONS))


def test_state_that_was_cut_off_is_refused(corpus, model, tmp_path):
    out = tmp_path / "lens"
    interrupted(corpus, model, out)
    (state,) = Partial(out).path.glob("*.safetensors")
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(FormatError, match=r"damaged.*Delete it"):
        build_index(*model, corpus, out, OPTIONS)


def test_two_writers_on_one_lens(corpus, model, straight, tmp_path):
    out = tmp_path / "lens"

    def slow():
        hang = StopAfter(2, lambda: time.sleep(600))
        build_index(*model, corpus, out, OPTIONS, progress=hang, save_seconds=0)

    child = index_in_child(slow)
    try:
        deadline = time.monotonic() + 60
        while not list(Partial(out).path.glob("*.safetensors")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for options in ({}, {"overwrite": True}):
            with pytest.raises(InputError, match=f"written to by another process, {child}"):
                build_index(*model, corpus, out, OPTIONS, **options)
        with pytest.raises(InputError, match=rf"written to by another process.*{child}"):
            build_index(*model, corpus, out, replace(OPTIONS, contexts=2), overwrite=True)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert_same_lens(straight, build_index(*model, corpus, out, OPTIONS))


def test_a_state_that_is_not_finite_leaves_nothing(corpus, model, tmp_path):
    broken, head = make_model(corpus)
    with torch.no_grad():
        broken.get_output_embeddings().weight[:] = torch.nan
        broken.model.norm.weight[0] = torch.nan
    with pytest.raises(InputError, match="not finite"):
        build_index(broken, head, corpus, tmp_path / "lens", OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_convergence_counts_every_token(corpus, straight):
    meta = json.loads((straight / "meta.json").read_text())
    curve = meta["convergence"]
    assert curve[-1]["tokens"] == meta["tokens"]
    assert curve[-1]["share"] == 1.0
    values = [point["mean_nearest_cosine"] for point in curve]
    assert values == sorted(values)
    assert values[0] < values[-1]
