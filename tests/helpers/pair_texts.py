"""A tiny directory of corpora, of sentences written for it."""

import pyarrow as pa
import pyarrow.parquet as pq

# Each line is a paragraph; in the corpus's files they begin and end with a space.
WIKITEXT = (
    "",
    "= A heading of several words =",
    "The harbour was built in January 1990 by a local company . He was the father of many sons .",
    "The old church has been a favourite of mine for 20 years . An <unk> tower is here .",
    "The team is known for its colourful flags . These books were written by the king 's sister .",
    "She moved to the house in the forest after the war ended . It was almost hand @-@ cut .",
)
TURNS = [
    "I don ' t know what he was doing there .",
    "We are going to the store , and she will help us .",
    "He's usually here at noon . Maybe it is too early .",
    "I can not see this picture very well today .",
    "They walked to the park with three dogs and two cats .",
    "My brother is buying a big car for his wife .",
]
NEWS = [
    "Prices rose. The company said on Monday that its profits are larger than expected.",
    "The woman told officials that she had seen several men near the large theater.",
    "Officials said the center of the city was closed for three days in August 2004.",
    "Mr. Brown did not answer questions about the defense of the harbor.",
]


def write_texts(place):
    """Write the corpora as `prismlm eval pairs --data` takes them."""
    columns = {
        "wikitext2": {"text": [f" {line} \n" for line in WIKITEXT]},
        "dailydialog": {"dialog": [TURNS[:3], TURNS[3:]]},
        "ag_news": {"text": NEWS},
    }
    for name, column in columns.items():
        (place / name).mkdir(parents=True)
        pq.write_table(pa.table(column), place / name / "a.parquet")
    return place
