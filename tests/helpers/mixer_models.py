"""Small random models with prototype mixers, others beside them, and a few documents."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prismlm.corpus import build_corpus
from prismlm.eval.robustness import COLUMNS
from prismlm.layers import PrototypeHead
from prismlm.models.presets import build_config, build_model
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import Sidecar, base_of, save_sidecar

VOCABULARY, WIDTH, CHANNELS, LAYERS = 300, 24, 6, 3
SUBJECTS = ["The river", "A teacher", "Old maps", "My neighbour", "The council", "Every winter"]
VERBS = ["carries", "describes", "forgets", "collects"]
PLACE = (0, 4)
OBJECTS = ["stones to the sea.", "the names of birds.", "letters in a box.", "what the town was."]


def make_model(vocabulary=VOCABULARY, **settings):
    torch.manual_seed(0)
    sizes = {"num_channels": CHANNELS, "num_hidden_layers": LAYERS, "hidden_size": WIDTH}
    settings = {"model_type": "prismlm_protot", "initializer_range": 0.3} | sizes | settings
    model = build_model(build_config(settings, vocabulary, 0)).eval()
    for layer, block in enumerate(model.model.layers):
        # Each channel decays as it likes, as after training.
        with torch.no_grad():
            block.mixer.decay_logits.copy_(torch.linspace(-1, 4, CHANNELS) + layer / 10)
            if block.mixer.decay_map is not None:
                block.mixer.decay_map.normal_()
    return model.requires_grad_(False)


def make_llama(vocabulary=VOCABULARY, kv_heads=2):
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
    config = AutoConfig.for_model("llama", vocab_size=vocabulary, **sizes)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def make_corpus(directory, copies=4):
    """Build 24 short documents, each several times, with tokens and all that a corpus has."""
    texts = [
        " ".join(f"{s} {v} {o}" for v in VERBS[: 1 + (i + j) % 4])
        for i, s in enumerate(SUBJECTS)
        for j, o in enumerate(OBJECTS * copies)
    ]
    source = directory / "documents.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return build_corpus(source, directory / "corpus", vocab_size=VOCABULARY)


def save_model(model, corpus, directory, *, trained_on=True, length=None):
    """Write a plain checkpoint, as ``prismlm train`` leaves one of a model without a head."""
    model.save_pretrained(directory)
    corpus.tokenizer.save_pretrained(directory)
    if trained_on:
        noted = {"name": corpus.name, "fingerprint": corpus.fingerprint}
        recipe = {"corpus": str(corpus.path)} | ({"data": {"length": length}} if length else {})
        (directory / "training.json").write_text(json.dumps({"recipe": recipe, "corpus": noted}))
    return directory


def save_with_head(model, tokenizer, directory):
    """Write a model directory with a random head, without a lens."""
    head = PrototypeHead(model.config.hidden_size, 64, 6, scale=2.0)
    head.reset_parameters(torch.Generator().manual_seed(3))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    save_sidecar(directory, Sidecar(head, LogitMap.of(model), base_of(model)))
    return directory


def tokens(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, shape, generator=generator)


def words_by_tokens(corpus):
    """Words of the corpus that are one token, and those that are several."""
    texts = {w for i in range(len(corpus)) for w in corpus.text(i).replace(".", "").split()[1:]}
    encoded = {w: corpus.tokenizer(f" {w}")["input_ids"] for w in sorted(texts)}
    single = [w for w, ids in encoded.items() if len(ids) == 1 and w.isalpha() and len(w) > 2]
    several = [w for w, ids in encoded.items() if len(ids) > 1 and w.islower()]
    assert len(single) > 3
    assert several
    return single, several


def planted_model(corpus, word):
    """A model whose channel 4 of layer 0 is written at one word above all; others write evenly."""
    model = make_model(len(corpus.tokenizer))
    for block in model.model.layers:
        block.mixer.prototypes.zero_()
    token = corpus.tokenizer(f" {word}")["input_ids"][0]
    embeddings = model.model.embed_tokens.weight
    embeddings[:, 0] = 0
    embeddings[token] = torch.eye(embeddings.shape[1])[0]
    model.model.layers[PLACE[0]].mixer.prototypes[PLACE[1], 0] = 5.0
    return model


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.4}
HEADS = {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
OTHERS = {
    "llama": SIZES | HEADS,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.4, "n_positions": 64},
    "mamba": SIZES | {"state_size": 4},
}


def make_studied(directory):
    """Write ``protot``, ``llama``, ``gpt2``, ``mamba`` and ``pairs.parquet`` into a directory."""
    corpus = make_corpus(directory)
    size = len(corpus.tokenizer)
    torch.manual_seed(0)
    models = {"protot": make_model(size)}
    for kind, sizes in OTHERS.items():
        config = AutoConfig.for_model(kind, vocab_size=size, **sizes)
        models[kind] = AutoModelForCausalLM.from_config(config)
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
