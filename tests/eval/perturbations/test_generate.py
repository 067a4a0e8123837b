from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from prismlm.errors import InputError
from prismlm.eval.pairs import INTERVENTIONS, SLICES
from prismlm.eval.perturbations.generate import (
    FILES,
    MiniLM,
    PairOptions,
    levenshtein,
    make_slice,
    write_pairs,
)
from prismlm.eval.perturbations.sentences import read_sentences
from tests.helpers.pair_texts import write_texts


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def model():
    return MiniLM()


def files(place):
    return [(place / name).read_bytes() for name in FILES]


def test_every_slice_is_full_and_a_seed_gives_the_same_bytes(data, tmp_path):
    options = PairOptions(per_slice=2, similarity=0.5)
    result = write_pairs(tmp_path / "a", data, options)
    write_pairs(tmp_path / "b", data, options)
    write_pairs(tmp_path / "c", data, PairOptions(per_slice=2, similarity=0.5, seed=1))
    assert files(tmp_path / "a") == files(tmp_path / "b") != files(tmp_path / "c")
    for name, slices in FILES.items():
        rows = pq.read_table(tmp_path / "a" / name).to_pylist()
        assert [row["id"] for row in rows] == sorted(f"{s}-0000{i}" for s in slices for i in (0, 1))
        for row in rows:
            assert row["id"].startswith(row["slice"])
            assert row["distance"] == levenshtein(row["original"], row["perturbed"]) > 0
            assert row["similarity"] >= (0.5 if row["slice"] in SLICES else -1)
    assert [row["slice"] for row in result["slices"]] == [*SLICES, *INTERVENTIONS]
    for row in result["slices"]:
        assert row["pairs"] == sum(row["sources"].values()) == 2


def test_what_is_unlike_is_filtered(data, model):
    sentences = read_sentences(data)
    options = PairOptions(per_slice=4, similarity=0.9)
    for name in ("typo", "gender"):
        strict = make_slice(name, sentences, options, model)
        lax = make_slice(name, sentences, replace(options, similarity=-1.0), model)
        # Whatever an intervention says is kept.
        assert (strict == lax) == (name == "gender")
        assert name == "gender" or min(row["similarity"] for row in strict) >= 0.9


def test_templates_come_last_and_are_marked(model):
    sentences = {"ag_news": ["The color was quite fine."]}
    for name in ("spelling", "contraction", "abbreviation"):
        found = make_slice(name, sentences, PairOptions(per_slice=5), model)
        sources = [row["source"] for row in found]
        assert sources.count("template") == (4 if name == "spelling" else 5)
        assert all(row["source"] == "template" for row in found[1:])


def test_a_slice_that_cannot_be_filled_says_how_many_it_has(data, tmp_path, model):
    sentences = {"ag_news": ["He was here at noon.", "She was there.", "It rained all day."]}
    with pytest.raises(InputError, match="'gender' has 2 pairs in 3 sentences"):
        make_slice("gender", sentences, PairOptions(per_slice=3), model)
    with pytest.raises(InputError, match="ask for fewer by --per-slice"):
        write_pairs(tmp_path / "out", data, PairOptions(per_slice=500))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("same", "same", 0), ("a b", "a, b", 1),
     ("Doctor", "Dr.", 5), ("flaw", "lawn", 2), ("aa", "a", 1)],
)  # fmt: skip
def test_letters_apart(one, other, distance):
    assert levenshtein(one, other) == levenshtein(other, one) == distance


def test_what_means_the_same_is_more_alike():
    pairs = [
        ("He was happy.", "He was glad."),
        ("He was happy.", "He was happy."),
        ("He was happy.", "The company sold its steel works in March."),
    ]
    near, same, far = MiniLM().similarity(pairs)
    assert same == 1
    assert far < 0.3 < 0.75 < near < 1
    # The model's card gives 0.6 and more for paraphrases; sentences beside it change nothing.
    assert MiniLM().similarity(pairs[:1])[0] == pytest.approx(near, abs=2e-4)
