"""Tiny random models of the families that a prototype head is tested beside, with a head each."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prismlm.corpus import Corpus, build_corpus
from prismlm.layers import PrototypeHead
from prismlm.lens.build import IndexOptions, build_index
from prismlm.models.seam import LogitMap, capture
from prismlm.models.sidecar import Sidecar, base_of, save_sidecar
from tests.helpers.records import sample_starts

config_of = AutoConfig.for_model
DOCUMENTS, CHARACTERS = 24, 150
V, WIDTH = 320, 16
PROTOTYPES, PER_TOKEN = 24, 4
WINDOW = 128
TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SIZES = TOKENS | {
    "vocab_size": V, "hidden_size": WIDTH, "num_hidden_layers": 2, "initializer_range": 0.4,
}  # fmt: skip
PHI = SIZES | {"intermediate_size": 24, "num_attention_heads": 2, "max_position_embeddings": WINDOW}
LLAMA = PHI | {"num_key_value_heads": 1}
FAMILIES = {
    "gpt2": lambda: config_of(
        "gpt2", **TOKENS, vocab_size=V, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=WINDOW,
        initializer_range=0.4, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    ),
    "llama": lambda: config_of("llama", **LLAMA, tie_word_embeddings=False),
    "llama-tied": lambda: config_of("llama", **LLAMA, tie_word_embeddings=True),
    "qwen3": lambda: config_of("qwen3", **LLAMA, head_dim=8),
    "mistral": lambda: config_of("mistral", **LLAMA, sliding_window=16),
    # A cap that bites: random logits are small.
    "gemma2": lambda: config_of("gemma2", **LLAMA, head_dim=8, final_logit_softcapping=4.0),
    "granite": lambda: config_of("granite", **LLAMA, logits_scaling=4.0),
    "cohere": lambda: config_of("cohere", **LLAMA, logit_scale=0.25),
    "mamba": lambda: config_of("mamba", **SIZES, state_size=4),
    "phi": lambda: config_of("phi", **PHI),
    "llama-bf16": lambda: config_of("llama", **LLAMA),
    "llama-int8": lambda: config_of("llama", **LLAMA),
}  # fmt: skip
# What follows W z, where it is not the identity.
MAPS = {
    "gemma2": LogitMap(softcap=4.0),
    "granite": LogitMap(scale=0.25),
    "cohere": LogitMap(scale=0.25),
    "phi": LogitMap(bias=True),
}
INT8 = "llama-int8"


def small_corpus(directory: Path) -> Path:
    """Write a corpus of the starts of some documents, of 320 different tokens."""
    source = directory / "documents.parquet"
    pq.write_table(sample_starts(DOCUMENTS, CHARACTERS), source)
    return build_corpus(source, directory / "small", vocab_size=V).path


def build(name: str):
    """Return the same random model of a family at every call, in evaluation mode, unquantised."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name]())
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias)
    return model.to(torch.bfloat16 if name == "llama-bf16" else torch.float32).eval()


def quantised(directory: Path):
    """Return the model of a directory with torchao's int8 weights, except for W."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    how = TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=["lm_head"])
    return AutoModelForCausalLM.from_pretrained(directory, quantization_config=how).eval()


@torch.no_grad()
def make_head(model, corpus: Corpus) -> PrototypeHead:
    """Return a head whose prototypes are placed on states of the corpus."""
    torch.manual_seed(1)
    head = PrototypeHead(WIDTH, PROTOTYPES, PER_TOKEN, scale=1.3)
    with capture(model) as seen:
        model(input_ids=torch.from_numpy(corpus.tokens(0, 5 * PROTOTYPES).astype("int64"))[None])
    head.place_on(seen.z[0, ::5].float())
    return head.eval().requires_grad_(False)


def make_directory(name: str, corpus: Corpus, directory: Path) -> Path:
    """Write a model directory with head and lens."""
    model = build(name)
    model.save_pretrained(directory)
    head = make_head(model, corpus)
    sidecar = Sidecar(head, LogitMap.of(model), base_of(model))
    if name == INT8:
        model = quantised(directory)
        # Weights that are open are mapped from the files, which are not to be written over.
        aside = directory.with_name(f"{directory.name}-quantised")
        model.save_pretrained(aside)
        for path in aside.iterdir():
            shutil.move(path, directory / path.name)
    corpus.tokenizer.save_pretrained(directory)
    save_sidecar(directory, sidecar)
    options = IndexOptions(contexts=2, window=WINDOW, stride=WINDOW // 2, split="all")
    build_index(model, head, corpus, directory / "lens" / "small", options, trained_on=False)
    return directory
