"""Small models with a tokenizer of words, and small copies of GLUE."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, LlamaConfig, Mamba2Config, PreTrainedTokenizerFast

from prismlm.models.presets import build_config, build_model

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
