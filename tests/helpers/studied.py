"""Tiny models of one tokenizer, and a few pairs of texts, that studies are made on."""

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MambaConfig

from prismlm.eval.robustness import COLUMNS
from tests.helpers.mixer_models import OBJECTS, SUBJECTS, VERBS, make_corpus, make_model, save_model

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.4}
LLAMA = SIZES | {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.4, "n_positions": 64}


def make_studied(directory):
    """Write ``protot``, ``llama``, ``gpt2``, ``mamba`` and ``pairs.parquet`` into a directory."""
    corpus = make_corpus(directory)
    size = len(corpus.tokenizer)
    torch.manual_seed(0)
    models = {"protot": make_model(size)}
    for config in (
        LlamaConfig(vocab_size=size, **LLAMA),
        GPT2Config(vocab_size=size, **GPT2),
        MambaConfig(vocab_size=size, state_size=4, **SIZES),
    ):
        models[config.model_type] = AutoModelForCausalLM.from_config(config)
    for name, model in models.items():
        save_model(model.eval(), corpus, directory / name, trained_on=False)
    rows = [
        {"id": f"{number:03}", "slice": name, "original": original, "perturbed": changed,
         "source": "wikitext2", "similarity": None}
        for number, (name, original, changed) in enumerate(pair_rows())
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema=COLUMNS), directory / "pairs.parquet")
    return directory


def pair_rows():
    """Return pairs of equal and of other lengths, and one that cannot be aligned."""
    rows = []
    for number, subject in enumerate(SUBJECTS):
        verb, thing = VERBS[number % 4], OBJECTS[number % 4]
        original = f"{subject} {verb} {thing}"
        changes = {
            "synonym": f"{subject} {VERBS[(number + 1) % 4]} {thing}",
            "typo": f"{subject} {verb} {thing[:4]}x{thing[4:]}",
            "punctuation": original.rstrip("."),
            "negation": f"{subject} never {verb} {thing}",
        }
        rows += [(name, original, changed) for name, changed in changes.items()]
    return [*rows, ("negation", "The river carries stones to the sea.", "ZQ")]
