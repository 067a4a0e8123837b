"""Tokenizers: training a lossless one, loading one, and comparing them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prismlm import fingerprints
from prismlm.corpus.encode import around_text, check_fast
from prismlm.errors import InputError, check_whole, first_line, no_panics
from prismlm.hub import hub_error
from prismlm.run_state import run_interruptibly

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from prismlm.corpus.store import Corpus

END_OF_TEXT = "<|endoftext|>"
MIN_VOCABULARY = 257  # every byte and the end of text
MAX_TRAINING_WORD = 100


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, deterministically.

    All 256 bytes are tokens, so decoding restores every text. ``<|endoftext|>`` ends a document and
    is the padding token; there is no BOS token. Little text gives fewer than ``vocab_size`` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    check_whole("the vocabulary size", vocab_size, MIN_VOCABULARY)
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Training time is quadratic in the longest word, such as base64 or a line of dashes.
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
    run_interruptibly(lambda: backend.train_from_iterator(texts, trainer))
    backend.pre_tokenizer = byte_level
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path_or_name: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer with an end-of-text token, from a directory or by its name."""
    from transformers import AutoTokenizer

    name = os.fspath(path_or_name)
    offline = None if Path(name).exists() else hub_error()
    try:
        with no_panics():
            loaded = AutoTokenizer.from_pretrained(
                name, trust_remote_code=False, local_files_only=offline is not None
            )
            # Settings of a wrong type fail only when a text is encoded.
            loaded("a")
    except Exception as error:  # transformers raises half a dozen unrelated types here
        what = "directory" if Path(name).exists() else "name"
        raise InputError(
            f"No tokenizer could be loaded from the {what} {name!r} "
            f"({offline or first_line(error)}). Expected a directory with "
            "tokenizer.json or a name on the Hugging Face Hub."
        ) from error
    check_tokenizer(loaded, name)
    return cast("PreTrainedTokenizerFast", loaded)


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """Raise InputError unless the tokenizer is a fast one with an end-of-text token."""
    check_fast(tokenizer, name)
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"The tokenizer {name!r} has no end-of-text token to end a document with. "
            "Set its eos_token, save it and use the saved directory."
        )


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a hash of everything that determines the token ids of a document.

    That excludes truncation, padding, and the post-processor except for the tokens that it adds.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for changeable in ("truncation", "padding", "post_processor"):
        state.pop(changeable, None)
    special = {"eos": tokenizer.eos_token, "bos": tokenizer.bos_token, "unk": tokenizer.unk_token}
    around = around_text(tokenizer)
    # Omitted if empty: older fingerprints do not include it.
    more = {"around": around} if any(around) else {}
    return fingerprints.of_json({"backend": state, "special": special, **more})


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the fingerprint of a model's tokenizer, or None if it is not a fast one."""
    from transformers import PreTrainedTokenizerFast

    return fingerprint(tokenizer) if isinstance(tokenizer, PreTrainedTokenizerFast) else None


def check_tokenizer_of(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise InputError unless a corpus was tokenised with this tokenizer."""
    if corpus.meta["tokenizer"]["fingerprint"] != tokenizer_fingerprint(tokenizer):
        raise InputError(
            f"the corpus {corpus.name} was built with another tokenizer than that of the "
            f"model{f' {name}' if name else ''}, or without the special tokens that it puts around "
            "a text. Build it again: prismlm corpus build IN --out DIR --tokenizer MODEL."
        )
