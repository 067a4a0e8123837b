from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from prismlm.errors import InputError
from prismlm.eval.perturbations import generate
from prismlm.eval.robustness import INTERVENTIONS, SLICES
from tests.helpers.eval_data import write_texts


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def sentences(data):
    return generate.read_sentences(data)


@pytest.fixture(scope="module")
def model():
    return generate.load_minilm()


def test_every_slice_depends_on_the_seed_alone(data, sentences, model, tmp_path):
    options = generate.PairOptions(per_slice=2, similarity=0.5)
    summaries = generate.write_pairs(tmp_path, data, options)["slices"]
    assert [row["slice"] for row in summaries] == [*SLICES, *INTERVENTIONS]
    assert all(row["pairs"] == sum(row["sources"].values()) == 2 for row in summaries)
    for file, slices in generate.FILES.items():
        rows = pq.read_table(tmp_path / file).to_pylist()
        assert [row["id"] for row in rows] == sorted(f"{s}-0000{i}" for s in slices for i in (0, 1))
        for row in rows:
            assert row["id"].startswith(row["slice"])
            assert row["original"] != row["perturbed"]
            assert row["similarity"] >= (0.5 if row["slice"] in SLICES else -1)
        texts = [row["perturbed"] for row in rows if row["slice"] == slices[0]]
        for seed in (0, 1):
            again = generate.make_slice(slices[0], sentences, replace(options, seed=seed), model)
            assert ([row["perturbed"] for row in again] == texts) == (seed == 0)


@pytest.mark.parametrize("name", ["typo", "gender"])
def test_dissimilar_perturbations_are_filtered_and_interventions_are_not(sentences, model, name):
    options = generate.PairOptions(per_slice=4, similarity=0.9)
    strict = generate.make_slice(name, sentences, options, model)
    lax = generate.make_slice(name, sentences, replace(options, similarity=-1.0), model)
    assert (strict == lax) == (name == "gender")
    assert name == "gender" or min(row["similarity"] for row in strict) >= 0.9


def test_a_slice_has_what_there_is_and_is_refused_if_that_is_nothing(model):
    def make(*sentences):
        options = generate.PairOptions(per_slice=3)
        return generate.make_slice("gender", {"ag_news": sentences}, options, model)

    assert len(make("He was here at noon.", "She was there.", "It rained all day.")) == 2
    with pytest.raises(InputError, match="'gender' has no pairs in 1 sentences"):
        make("It rained all day.")


def test_paraphrases_are_more_similar_than_other_sentences(model):
    others = ("He was glad.", "He was happy.", "The company sold its steel works in March.")
    pairs = [("He was happy.", other) for other in others]
    near, same, far = generate.similarity(model, pairs)
    assert far < 0.3 < 0.75 < near < same == pytest.approx(1)
    # Other sentences of the batch change nothing.
    assert generate.similarity(model, pairs[:1])[0] == pytest.approx(near, abs=2e-4)


# -- sentences


def test_signs_go_where_people_put_them():
    for tokenised, written in {
        "The well @-@ known 7 @.@ 2 kg cat , and 10 @,@ 000 others .":
            "The well-known 7.2 kg cat, and 10,000 others.",
        "I ' m sure it isn ' t Bob ' s .": "I'm sure it isn't Bob's.",
        'It became " lobster red " on cooking .': 'It became "lobster red" on cooking.',
        "It was 15 % or $ 20 !": "It was 15% or $20!",
        "I don’t know ; do you ?": "I don't know; do you?",
    }.items():  # fmt: skip
        assert generate.detokenise(tokenised) == written


def test_news_is_split_where_sentences_end_and_odd_ones_are_left_out():
    text = "Mr. Brown of the U.S. Navy met J. Smith here. They left at noon. Why did they go there?"
    odd = [
        "TORONTO, Canada -- A second team has announced a date.",
        "it begins with a small letter here.",
        "This one has no end of its own",
        "This was reported by Reuters in the morning.",
        "There is an entity &lt; in this sentence.",
        "He said that that was the the end.",
        'He said "it is never closed here.',
        "This is the latest issue of the.",
        " ".join(["word"] * 30).capitalize() + ".",
    ]
    assert list(generate.sentences_of("ag_news", [*odd, text])) == [
        "Mr. Brown of the U.S. Navy met J. Smith here.",
        "Why did they go there?",
    ]


def test_a_directory_gives_sentences_by_source_and_what_is_missing_is_named(sentences, tmp_path):
    assert list(sentences) == ["wikitext2", "dailydialog", "ag_news"]
    assert sentences["wikitext2"][0] == "The harbour was built in January 1990 by a local company."
    assert "These books were written by the king's sister." in sentences["wikitext2"]
    assert not any("unk" in text or "heading" in text for text in sentences["wikitext2"])
    assert sentences["dailydialog"][:1] == ["I don't know what he was doing there."]
    assert sentences["ag_news"][0].startswith("The company said on Monday")
    with pytest.raises(InputError, match=r"wikitext2 has no \*.parquet.*leave --data out"):
        generate.read_sentences(tmp_path)
