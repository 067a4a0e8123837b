"""Tokenizers that put <s> before a text or spell spaces as SentencePiece does, and a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from prismlm.corpus import build_corpus
from prismlm.lens.build import IndexOptions, index
from tests.helpers.mixer_models import save_with_head
from tests.helpers.records import sample_starts

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{{ bos_token + '[INST] ' + message.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
WINDOW = 48


def texts(count: int) -> list[dict[str, Any]]:
    """Return the starts of some documents of the bundled sample."""
    return sample_starts(count, 600).to_pylist()


def begun_tokenizer(kind: str = "bytes") -> PreTrainedTokenizerFast:
    """Return one that puts ``<s>`` before a text; of bytes, or of words that begin with a space.

    Args:
        kind: ``bytes``, ``first`` (a space before a text's first word alone) or ``always``.
    """
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        backend.decoder = decoders.Metaspace(prepend_scheme=kind)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([row["text"] for row in texts(60)], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", SPECIAL.index("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def begun_model(directory: Path) -> Path:
    """Write a model directory with a lens of a small corpus, which stands beside it."""
    torch.manual_seed(0)
    tokenizer, place = begun_tokenizer(), directory / "model"
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
    )  # fmt: skip
    save_with_head(LlamaForCausalLM(config).eval(), tokenizer, place)
    pq.write_table(sample_starts(40, 600), directory / "texts.parquet")
    corpus = build_corpus(directory / "texts.parquet", directory / "corpus", tokenizer=place)
    index(place, corpus, "own", IndexOptions(contexts=4, window=WINDOW, stride=WINDOW // 2))
    return place


@contextmanager
def reading(model: torch.nn.Module) -> Iterator[list[list[int]]]:
    """Note the rows of ids that a model reads during the block, padding left out."""
    rows: list[list[int]] = []

    def note(_: Any, __: Any, given: dict[str, Any]) -> None:
        ids, mask = given["input_ids"], given.get("attention_mask")
        kept = torch.ones_like(ids) if mask is None else mask[:, -ids.shape[1] :]
        rows.extend(row[seen.bool()].tolist() for row, seen in zip(ids, kept, strict=True))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()


def metaspace(texts: Sequence[str], *, legacy: bool = False) -> PreTrainedTokenizerFast:
    """Train one on some words; a legacy one puts a space even before a text that has one."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "</s>"]
    tokenizer.train_from_iterator(
        list(texts) * 50, trainers.BpeTrainer(special_tokens=special, show_progress=False)
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.pre_tokenizer = None
        strip = decoders.Strip(" ", 1, 0)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
