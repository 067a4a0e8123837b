"""Small models, and small copies of the data that evaluations read: questions, GLUE, corpora."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, LlamaConfig, Mamba2Config, PreTrainedTokenizerFast

from prismlm.models.presets import build_config, build_model

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


WORDS = ["<eos>", "<unk>", "good", "bad", *"abcdefghijklmnopqrstuvwxyz"]
V = len(WORDS)
SIZES = {"vocab_size": V, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WIDE = SIZES | {"hidden_size": 32, "num_hidden_layers": 2}
CONFIGS = {
    "gpt2": lambda: GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=2, n_positions=64),
    "llama": lambda: LlamaConfig(**WIDE, intermediate_size=48, num_attention_heads=2),
    "mamba2": lambda: Mamba2Config(
        **WIDE, state_size=8, head_dim=16, num_heads=4, n_groups=1, chunk_size=16
    ),
    "protot": lambda: build_config({"model_type": "prismlm_protot", "num_channels": 8} | OWN, V, 0),
}
OWN = {"hidden_size": 32, "num_hidden_layers": 2, "dropout": 0.0}


def words_tokenizer():
    """Return a tokenizer of words that adds nothing."""
    tokens = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<eos>", bos_token="<eos>", unk_token="<unk>"
    )


def save_glue_model(directory: Path, family: str = "llama") -> Path:
    """Write a random model of a family."""
    torch.manual_seed(0)
    build_model(CONFIGS[family]()).save_pretrained(directory)
    words_tokenizer().save_pretrained(directory)
    return directory


def write_rows(directory: Path, task: str, split: str, rows: list) -> None:
    """Write the file of a split, named as on the hub."""
    (directory / task).mkdir(parents=True, exist_ok=True)
    path = directory / task / f"{split}-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_toy(directory: Path, *, rows: int = 128) -> Path:
    """Write SST-2, of which one word says the label, and RTE, of which no word does."""
    chance = random.Random(0)

    def letters():
        return chance.choices(WORDS[4:], k=chance.randint(1, 6))

    def sst2(label, split, row):
        words = [*letters(), ("bad", "good")[label], *letters()]
        return {"sentence": " ".join(words), "label": label, "id": f"{split}-{row}"}

    def rte(label, split, row):
        sentences = {"sentence1": " ".join(letters()), "sentence2": " ".join(letters())}
        return sentences | {"id": f"{split}-{row}", "label": label}

    for task, make in (("sst2", sst2), ("rte", rte)):
        for split, count in (("train", rows), ("validation", rows // 4)):
            made = [make(row % 2, split, row) for row in range(count)]
            write_rows(directory, task, split, made)
    return directory


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
