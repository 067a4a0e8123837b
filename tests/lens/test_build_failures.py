"""Signals, full disks, two writers and damaged files: what they leave of an index."""

import os
import random
import shutil
import signal
import time
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from prismlm.errors import InputError, Interrupted, PrismError
from prismlm.lens.build import Parts, build_index, check_index
from prismlm.lens.options import Shard
from tests.helpers.file_limit import limit_files, limit_lifted_after
from tests.helpers.kills import OPTIONS, index_in_child, make_corpus, make_model
from tests.lens.test_build import assert_same_lens


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def model(corpus):
    return make_model(corpus)


@pytest.fixture(scope="module")
def straight(corpus, model, tmp_path_factory):
    return build_index(*model, corpus, tmp_path_factory.mktemp("straight") / "lens", OPTIONS)


def part_of(number, count, **changed):
    return replace(OPTIONS, shard=Shard(number, count), **changed)


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
    results = [build_index(*model, corpus, out, part_of(i, count)) for i in order]
    assert results == [None] * (count - 1) + [out]
    assert_same_lens(straight, out)
    assert [path.name for path in tmp_path.iterdir()] == ["lens"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_finished_parts_and_says_how_to_resume(
    corpus, model, straight, tmp_path, number, code
):
    out = tmp_path / "lens"
    stop = StopAfter(3, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted, match="No part was finished") as stopped:
        build_index(*model, corpus, out, part_of(1, 2), progress=stop)
    assert stopped.value.exit_code == code
    assert list(tmp_path.iterdir()) == []
    build_index(*model, corpus, out, part_of(0, 2))
    stop = StopAfter(3, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted, match="same command again") as stopped:
        build_index(*model, corpus, out, part_of(1, 2), progress=stop)
    assert str(Parts(out, 2).path) in str(stopped.value)
    assert not out.exists()
    # What was finished is not read again.
    again = StopAfter(1, pytest.fail)
    assert build_index(*model, corpus, out, part_of(0, 2), progress=again) is None
    assert_same_lens(straight, build_index(*model, corpus, out, part_of(1, 2)))


def all_parts_but_no_lens(corpus, model, out, last):
    """Index the last part, as if the process had ended before it wrote the lens."""
    with patch("prismlm.lens.build.discard"):
        build_index(*model, corpus, out, last)
    shutil.rmtree(out)


@pytest.mark.parametrize("size", [200, 20_000])
@pytest.mark.parametrize("part", [0, 1], ids=["in the scan", "in writing the lens"])
def test_a_full_disk_leaves_nothing_half_written(corpus, model, straight, tmp_path, size, part):
    out = tmp_path / "lens"
    for number in range(part * 2):
        build_index(*model, corpus, out, part_of(number, 3))
    if part:
        all_parts_but_no_lens(corpus, model, out, part_of(2, 3))
    full = StopAfter(1, lambda: limit_files(size))
    with (
        limit_lifted_after(),
        pytest.raises(PrismError, match=r"could not be written.*same command"),
    ):
        build_index(*model, corpus, out, part_of(2, 3) if part else OPTIONS, progress=full)
    assert not out.exists()
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".lock")]
    assert Parts(out, 3).complete() == [0, 1, 2][: part * 3]
    again = build_index(*model, corpus, out, part_of(2, 3) if part else OPTIONS)
    assert_same_lens(straight, again)


def test_another_input_is_refused_and_named(corpus, model, straight, tmp_path):
    out, first = tmp_path / "lens", part_of(0, 2)
    build_index(*model, corpus, out, first)
    with pytest.raises(InputError, match=r"contexts: 4 → 5.*--overwrite"):
        build_index(*model, corpus, out, replace(first, contexts=5))
    other = make_model(corpus, seed=1)
    with pytest.raises(InputError, match=r"model: .* → .*prototypes: "):
        build_index(*other, corpus, out, first)
    text = make_corpus(tmp_path / "other", seed=3)
    with pytest.raises(InputError, match="corpus: "):
        build_index(*model, text, out, first)
    with pytest.raises(InputError, match="shards: 2 → 3"):
        build_index(*model, corpus, out, part_of(0, 3))
    with pytest.raises(InputError, match="another tokenizer than the model's"):
        check_index(model[0], corpus, first, "0" * 32)
    assert_same_lens(straight, build_index(*model, corpus, out, part_of(1, 2)))
    shutil.rmtree(out)
    build_index(*model, corpus, out, replace(first, contexts=5))
    build_index(*model, corpus, out, first, overwrite=True)
    assert_same_lens(straight, build_index(*model, corpus, out, part_of(1, 2)))


def test_two_writers_on_one_lens(corpus, model, straight, tmp_path):
    out = tmp_path / "lens"

    def slow():
        hang = StopAfter(2, lambda: time.sleep(600))
        build_index(*model, corpus, out, OPTIONS, progress=hang)

    child = index_in_child(slow)
    try:
        deadline = time.monotonic() + 60
        while not list(Parts(out, 1).path.glob(".part-*.tmp")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for options in ({}, {"overwrite": True}):
            with pytest.raises(InputError, match=f"written to by another process, {child}"):
                build_index(*model, corpus, out, OPTIONS, **options)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert_same_lens(straight, build_index(*model, corpus, out, OPTIONS))
    assert [path.name for path in tmp_path.iterdir()] == ["lens"]


def test_a_lens_that_another_process_wrote_meanwhile_is_refused_before_reading(
    corpus, model, straight, tmp_path, monkeypatch
):
    out = tmp_path / "lens"
    monkeypatch.setattr(Parts, "check", lambda *_, **__: shutil.copytree(straight, out))
    with pytest.raises(InputError, match="exists"):
        build_index(*model, corpus, out, OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["lens"]


@pytest.mark.parametrize("codes", ["pq", "pq12"])
def test_parts_make_the_lens_of_one_with_product_quantisation(corpus, model, tmp_path, codes):
    one = build_index(*model, corpus, tmp_path / "one", replace(OPTIONS, codes=codes))
    for number in (1, 0):
        build_index(*model, corpus, tmp_path / "two", part_of(number, 2, codes=codes))
    assert_same_lens(one, tmp_path / "two")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"window": -1}, "--window is -1"),
        ({"stride": -1}, "--stride is -1"),
        ({"stride": 65}, "--stride is 65: .* from 1 to 64"),
        ({"contexts": 0}, "--contexts is 0"),
        ({"shard": Shard(2, 2)}, "the part to read is 2: .* from 0 to 1"),
    ],
)
def test_options_that_cannot_be_used_are_refused_before_reading(
    corpus, model, tmp_path, changed, words
):
    with pytest.raises(InputError, match=words):
        build_index(*model, corpus, tmp_path / "lens", replace(OPTIONS, **changed))
    assert not list(tmp_path.iterdir())


def test_a_state_that_is_not_finite_leaves_nothing(corpus, model, tmp_path):
    broken, head = make_model(corpus)
    with torch.no_grad():
        broken.get_output_embeddings().weight[:] = torch.nan
        broken.model.norm.weight[0] = torch.nan
    with pytest.raises(InputError, match="not finite"):
        build_index(broken, head, corpus, tmp_path / "lens", OPTIONS)
    assert list(tmp_path.iterdir()) == []
