from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from prismlm.corpus import Corpus

CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


def ordinary_model(corpus: Path, directory: Path, seed: int) -> Path:
    """Write a random GPT-2 of the corpus's tokens, as anyone would save one."""
    torch.manual_seed(seed)
    tokenizer = Corpus.open(corpus).tokenizer
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=1024,
        initializer_range=0.4, bos_token_id=0, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def ordinary(tiny_corpus, tmp_path_factory):
    """Two random GPT-2s of the tokenizer of `tiny_corpus`."""
    place = tmp_path_factory.mktemp("ordinary")
    return [ordinary_model(tiny_corpus, place / name, seed) for seed, name in enumerate("ab")]
