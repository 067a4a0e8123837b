import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm.errors import FormatError, InputError
from prismlm.eval.perturbations.sentences import detokenise, read_sentences, sentences_of
from tests.helpers.pair_texts import write_texts


@pytest.mark.parametrize(
    ("tokenised", "written"),
    [
        ("The well @-@ known 7 @.@ 2 kg cat , and 10 @,@ 000 others .",
         "The well-known 7.2 kg cat, and 10,000 others."),
        ("I ' m sure it isn ' t Bob ' s .", "I'm sure it isn't Bob's."),
        ('It became " lobster red " on cooking .', 'It became "lobster red" on cooking.'),
        ("It was 15 % or $ 20 !", "It was 15% or $20!"),
        ("I don’t know ; do you ?", "I don't know; do you?"),
    ],
)  # fmt: skip
def test_signs_go_where_people_put_them(tokenised, written):
    assert detokenise(tokenised) == written


def test_news_is_split_where_sentences_end():
    text = "Mr. Brown of the U.S. Navy met J. Smith here. They left at noon. Why did they go there?"
    assert list(sentences_of("ag_news", [text])) == [
        "Mr. Brown of the U.S. Navy met J. Smith here.",
        "Why did they go there?",
    ]


@pytest.mark.parametrize(
    "odd",
    [
        "TORONTO, Canada -- A second team has announced a date.",
        "it begins with a small letter here.",
        "This one has no end of its own",
        "This was reported by Reuters in the morning.",
        "There is an entity &lt; in this sentence.",
        "He said that that was the the end.",
        'He said "it is never closed here.',
        "This is the latest issue of the.",
        " ".join(["word"] * 30).capitalize() + ".",
    ],
)
def test_odd_sentences_are_left_out(odd):
    assert list(sentences_of("ag_news", [odd])) == []


def test_a_directory_gives_sentences_by_source(tmp_path):
    found = read_sentences(write_texts(tmp_path))
    assert list(found) == ["wikitext2", "dailydialog", "ag_news"]
    assert found["wikitext2"][0] == "The harbour was built in January 1990 by a local company."
    assert "These books were written by the king's sister." in found["wikitext2"]
    assert not any("unk" in text or "heading" in text for text in found["wikitext2"])
    assert found["dailydialog"][:1] == ["I don't know what he was doing there."]
    # The headline was left out.
    assert found["ag_news"][0].startswith("The company said on Monday")


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(InputError, match=r"has no wikitext2/\*.txt.*leave --data out"):
        read_sentences(tmp_path)
    data = write_texts(tmp_path / "data")
    news = data / "ag_news" / "a.parquet"
    for column, text, message in (
        ("body", "a", "has the columns body: expected text"),
        ("text", "Too short.", "no sentences of 5 to 20 words in ag_news"),
    ):
        pq.write_table(pa.table({column: [text]}), news)
        with pytest.raises(FormatError, match=message):
            read_sentences(data)
