"""A few questions of three tasks, as copies of the hub's datasets."""

from pathlib import Path

import yaml
from datasets import Dataset

ARC = [
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
]
PIQA = [
    {"goal": "To boil water", "sol1": "heat it.", "sol2": "cool it.", "label": 0},
    {"goal": "To cut paper", "sol1": "use a spoon.", "sol2": "use scissors.", "label": 1},
]
WINOGRANDE = [
    {"sentence": "Ann thanked Eve since _ helped.", "option1": "Ann", "option2": "Eve"}
    | {"answer": answer}
    for answer in ("2", "1")
]
DATASETS = {
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", ARC),
    "piqa": ("baber/piqa", "default", PIQA),
    "winogrande": ("allenai/winogrande", "winogrande_xl", WINOGRANDE),
}


def write_benchmarks(directory: Path, *names: str, rows=None) -> Path:
    """Write copies of the datasets of these tasks."""
    for name in names:
        hub, config, own = DATASETS[name]
        splits = ("train", "validation", "test")
        files = [{"split": split, "path": f"{split}.parquet"} for split in splits]
        card = yaml.safe_dump({"configs": [{"config_name": config, "data_files": files}]})
        (directory / hub).mkdir(parents=True, exist_ok=True)
        (directory / hub / "README.md").write_text(f"---\n{card}---\n")
        for split in splits:
            Dataset.from_list(rows or own).to_parquet(directory / hub / f"{split}.parquet")
    return directory
