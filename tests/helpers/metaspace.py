"""Tokenizers that spell spaces as SentencePiece does, and drop the first when they decode."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


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
