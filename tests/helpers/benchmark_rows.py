"""A few questions of each task: as the hub has them, and as rows of the local Parquet files."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

LEAD = "Clean and jerk: A lady walks to a barbell. She bends down and grabs the pole."

# By task: lm-eval's split, documents of the hub, file of the rows, the same questions as rows.
QUESTIONS = {
    "arc_easy": (
        "test",
        [
            {
                "question": "Which animal can fly?",
                "choices": {"text": ["a dog", "a bird", "a fish"], "label": ["1", "2", "3"]},
                "answerKey": "2",
            },
            {
                "question": "What do plants take in?",
                "choices": {"text": ["stone", "wool", "iron", "light"], "label": list("ABCD")},
                "answerKey": "D",
            },
        ],
        "arc_easy_test",
        [
            {
                "question": "Which animal can fly?",
                "choices": ["a dog", "a bird", "a fish"],
                "label": 1,
            },
            {
                "question": "What do plants take in?",
                "choices": ["stone", "wool", "iron", "light"],
                "label": 3,
            },
        ],
    ),
    "boolq": (
        "validation",
        [
            {"question": "is the sun a star", "passage": "Sun -- The Sun is a star.", "label": 1},
            {"question": "is iron a plant", "passage": "Iron -- A metal.", "label": 0},
        ],
        "boolq_dev",
        [
            {
                "title": "Sun",
                "question": "is the sun a star",
                "passage": "The Sun is a star.",
                "label": 1,
            },
            {"title": "Iron", "question": "is iron a plant", "passage": "A metal.", "label": 0},
        ],
    ),
    "hellaswag": (
        "validation",
        [
            {
                "activity_label": "Clean and jerk",
                "ctx_a": "A lady walks to a barbell. She bends down and grabs the pole.",
                "ctx_b": "the lady",
                "endings": ["swings.", "pulls the barbell.", "sleeps.", "stands and lifts it."],
                "label": "3",
            },
            {
                "activity_label": "Home and Garden",
                "ctx_a": "[header] How to fold a shirt [title] Lay it flat. [step] Face it down.",
                "ctx_b": "",
                "endings": ["Fold it. [substeps] Twice.", "Burn it.", "Eat it.", "Throw it."],
                "label": "0",
            },
        ],
        "hellaswag_val",
        [
            {
                "ctx": f"{LEAD} the lady",
                "endings": ["swings.", "pulls the barbell.", "sleeps.", "stands and lifts it."],
                "label": 3,
            },
            {
                "ctx": "Home and Garden: How to fold a shirt. Lay it flat. Face it down.",
                "endings": ["Fold it. Twice.", "Burn it.", "Eat it.", "Throw it."],
                "label": 0,
            },
        ],
    ),
    "mmlu": (
        "test",
        [
            {"question": " Which bone is longest?", "choices": list("wxyz"), "answer": 2},
            {"question": "Which is a vein?", "choices": ["a", "b", "c", "d"], "answer": 0},
        ],
        "mmlu_test",
        [
            {
                "subject": "anatomy",
                "question": " Which bone is longest?",
                "choices": list("wxyz"),
                "label": 2,
            },
            {
                "subject": "anatomy",
                "question": "Which is a vein?",
                "choices": ["a", "b", "c", "d"],
                "label": 0,
            },
        ],
    ),
    "openbookqa": (
        "test",
        [
            {
                "question_stem": "The sun is responsible for",
                "choices": {"text": ["snow", "light", "salt", "sand"], "label": list("ABCD")},
                "answerKey": "B",
            },
            {
                "question_stem": "Fog is likely around:",
                "choices": {
                    "text": ["a marsh", "a desert", "a pan", "a road"],
                    "label": list("ABCD"),
                },
                "answerKey": "A",
            },
        ],
        "openbookqa_test",
        [
            {
                "question": "The sun is responsible for",
                "choices": ["snow", "light", "salt", "sand"],
                "label": 1,
            },
            {
                "question": "Fog is likely around:",
                "choices": ["a marsh", "a desert", "a pan", "a road"],
                "label": 0,
            },
        ],
    ),
    "piqa": (
        "validation",
        [
            {"goal": "dry a shirt", "sol1": "hang it up", "sol2": "drown it", "label": 0},
            {"goal": "boil an egg", "sol1": "freeze it", "sol2": "heat it in water", "label": 1},
        ],
        "piqa_valid",
        [
            {"question": "dry a shirt", "choices": ["hang it up", "drown it"], "label": 0},
            {"question": "boil an egg", "choices": ["freeze it", "heat it in water"], "label": 1},
        ],
    ),
    "winogrande": (
        "validation",
        [
            {
                "sentence": "Ann thanked Eve because _ had helped.",
                "option1": "Ann",
                "option2": "Eve",
                "answer": "2",
            },
            {
                "sentence": "The cup did not fit the box as _ was large.",
                "option1": "the cup",
                "option2": "the box",
                "answer": "1",
            },
        ],
        "winogrande_dev",
        [
            {
                "sentence": "Ann thanked Eve because _ had helped.",
                "option1": "Ann",
                "option2": "Eve",
                "label": 1,
            },
            {
                "sentence": "The cup did not fit the box as _ was large.",
                "option1": "the cup",
                "option2": "the box",
                "label": 0,
            },
        ],
    ),
}  # fmt: skip
_SPLIT, _OF_HUB, _FILE, _ROWS = QUESTIONS["arc_easy"]
QUESTIONS["arc_challenge"] = (_SPLIT, _OF_HUB, "arc_challenge_test", _ROWS)


def write_rows(directory: Path, name: str, rows: list) -> None:
    """Write one of the files."""
    pq.write_table(pa.Table.from_pylist(rows), directory / f"{name}.parquet")


def write_benchmarks(directory: Path, *names: str) -> Path:
    """Write the files of these tasks."""
    directory.mkdir(exist_ok=True)
    for name in names:
        _, _, stem, rows = QUESTIONS[name]
        write_rows(directory, stem, rows)
    return directory
