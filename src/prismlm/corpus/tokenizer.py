"""Tokenizers: training one that loses nothing, loading one, and telling two apart."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prismlm import fingerprints
from prismlm.corpus.encode import around_text, check_fast
from prismlm.errors import InputError, first_line, no_panics
from prismlm.hub import silence
from prismlm.run_state import answering

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from prismlm.corpus.store import Corpus

END_OF_TEXT = "<|endoftext|>"
MIN_VOCABULARY = 257  # every byte and the end of text
MAX_TRAINING_WORD = 100


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; the same texts in the same order give the same one.

    All 256 bytes are tokens, so that every text comes back exactly. ``<|endoftext|>`` ends a
    document and is the padding token too; there is no token for the beginning. Little text gives
    fewer than ``vocab_size`` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    check_vocab_size(vocab_size)
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Training takes time quadratic in the longest word: base64 or a rule of dashes would stall it.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [byte_level, pre_tokenizers.FixedLength(MAX_TRAINING_WORD)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    answering(lambda: backend.train_from_iterator(texts, trainer))
    backend.pre_tokenizer = byte_level
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def check_vocab_size(vocab_size: int) -> None:
    """Raise InputError where a vocabulary could not hold every byte and the end of text."""
    if vocab_size < MIN_VOCABULARY:
        raise InputError(
            f"A vocabulary of {vocab_size} is too small: expected at least {MIN_VOCABULARY}, "
            "for the 256 bytes and the end of text."
        )


def load_tokenizer(path_or_name: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer that can end a document, from a directory or by its name."""
    from transformers import AutoTokenizer

    name = os.fspath(path_or_name)
    silent = None if Path(name).exists() else silence()
    try:
        with no_panics():
            loaded = AutoTokenizer.from_pretrained(
                name, trust_remote_code=False, local_files_only=silent is not None
            )
            # Settings of a wrong type are noticed where a text is read.
            loaded("a")
    except Exception as error:  # transformers raises half a dozen unrelated types here
        what = "directory" if Path(name).exists() else "name"
        raise InputError(
            f"No tokenizer could be loaded from the {what} {name!r} "
            f"({silent or first_line(error)}). Expected a directory with "
            "tokenizer.json or a name on the Hugging Face Hub."
        ) from error
    check_tokenizer(loaded, name)
    return cast("PreTrainedTokenizerFast", loaded)


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """Raise InputError unless the tokenizer is a fast one and can end a document."""
    check_fast(tokenizer, name)
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"The tokenizer {name!r} has no end-of-text token to end a document with. "
            "Set its eos_token, save it and use the saved directory."
        )


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a hash of all that decides which ids a document gets.

    Truncation and padding are left out, and of a post-processor all but the tokens that it puts
    around a text.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for changeable in ("truncation", "padding", "post_processor"):
        state.pop(changeable, None)
    special = {"eos": tokenizer.eos_token, "bos": tokenizer.bos_token, "unk": tokenizer.unk_token}
    around = around_text(tokenizer)
    # Only where there are any, so that other tokenizers keep the fingerprint that they had before.
    more = {"around": around} if any(around) else {}
    return fingerprints.of_json({"backend": state, "special": special, **more})


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the fingerprint of a model's tokenizer, or None if it is not one a corpus can have."""
    from transformers import PreTrainedTokenizerFast

    fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    return fingerprint(tokenizer) if fast else None


def check_tokenizer_of(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise InputError unless a corpus holds the tokens of this tokenizer."""
    if corpus.meta["tokenizer"]["fingerprint"] != tokenizer_fingerprint(tokenizer):
        raise InputError(
            f"the corpus {corpus.name} holds the tokens of another tokenizer than that of the "
            f"model{f' {name}' if name else ''}, or was built without the special tokens that it "
            "puts around a text. Build it again with that one: prismlm corpus build IN --out DIR "
            "--tokenizer MODEL."
        )
