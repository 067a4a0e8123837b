"""A corpus of random words and an untrained model, to be indexed over and over."""

import json
import random

import torch

from prismlm.corpus import build_corpus
from prismlm.layers import PrototypeHead
from prismlm.lens.build import IndexOptions
from prismlm.models.presets import build_config, build_model
from tests.helpers.mixer_models import save_with_head

OPTIONS = IndexOptions(contexts=4, window=64, stride=48, split="all")
WORDS = (
    *("light", "water", "stone", "river", "cell", "law", "price", "star", "tree", "code", "bank"),
    *("music", "ship", "corn"),
)


def make_corpus(directory, documents=90, words=160, seed=0):
    """Write a corpus of random words in three sources."""
    rng = random.Random(seed)
    source = directory / "text"
    source.mkdir(parents=True)
    for name in ("a", "b", "c"):
        lines = [
            json.dumps({"text": " ".join(rng.choices(WORDS, k=rng.randint(5, words)))})
            for _ in range(documents // 3)
        ]
        (source / f"{name}.jsonl").write_text("\n".join(lines))
    return build_corpus([source], directory / "corpus", vocab_size=300, heldout_fraction=0.2)


def make_model(corpus, seed=0):
    """Return a tiny model and head that are not trained."""
    torch.manual_seed(seed)
    config = build_config({"preset": "llama-tiny"}, len(corpus.tokenizer), corpus.eos_token_id)
    model = build_model(config).eval()
    head = PrototypeHead(config.hidden_size, 48, 4)
    head.reset_parameters()
    return model, head


def save_model(directory):
    """Write such a corpus, and such a model with its head, and return both directories."""
    corpus = make_corpus(directory)
    return save_with_head(make_model(corpus)[0], corpus.tokenizer, directory / "model"), corpus.path
