"""A model directory on the Hugging Face Hub: its files, its card, and the licences of its text."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prismlm.errors import InputError, check_kind, first_line, shown
from prismlm.files import read_json, write_json
from prismlm.hub import NAME, hub_error
from prismlm.lens.layout import META_FILE, PROTOTYPES_FILE, trained_on_words, write_meta
from prismlm.lens.lens import Lens
from prismlm.lens.opened_model import OpenedModel
from prismlm.models.sidecar import META_FILE as MODEL_FILE
from prismlm.models.uncertainty_feedback import UNCERTAINTY_FILE

CARD, ADAPTER_CONFIG = "README.md", "adapter/adapter_config.json"
# Files needed to open a model, and their licences. No other file is uploaded: run logs contain
# paths, and optimizer states or a user's own pages are private.
UPLOADED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template.*", "additional_chat_templates/*.jinja"),
    *("LICENSE*", "LICENCE*", "NOTICE*", "ATTRIBUTION*"),
    *(ADAPTER_CONFIG, "adapter/adapter_model.safetensors"),
)
# Licences whose text may be passed on, with attribution or the same licence where they ask for it.
OPEN = re.compile(
    r"\b(cc0|cc[ -]by|public[ -]domain|pddl|odc-by|odbl|apache|mit|bsd|isc|mpl|[la]?gpl|gfdl|ogl|"
    r"unlicense|etalab)\b",
    re.IGNORECASE,
)
RESTRICTED = re.compile(
    r"\b((nc|nd)(?![a-z])|non[ -]?commercial|no[ -]?deriv\w*|research[ -]only)", re.IGNORECASE
)
MAX_ROWS = 20


@dataclass(frozen=True)
class Pushed:
    """What a push uploads: ``card`` is the text of its README.md, ``files`` names all of them."""

    url: str
    card: str
    files: tuple[str, ...]


def push(
    lm: OpenedModel,
    name: str,
    *,
    private: bool = False,
    with_lens: bool = True,
    allow_licenses: Collection[str] = (),
    dry_run: bool = False,
) -> Pushed:
    """Upload a model directory with its lens and a card to the Hugging Face Hub, in one commit.

    The card is written from the metadata in the directory; a README.md in the directory takes its
    place, and one on the hub stays. Paths of this machine are removed.

    Args:
        lm: an opened model.
        name: ``org/name``; created if it does not exist.
        private: only for its owners; an existing public repository is refused.
        with_lens: upload the open lens, whose tokens are the text of the corpus.
        allow_licenses: licences of that text to upload although they are not known to be open.
        dry_run: upload nothing.
    """
    check_kind("the name on the hub", name, str, "org/name")
    if not NAME.fullmatch(name):
        raise InputError(f"the name on the hub is {shown(name)}: expected org/name.")
    lens = lm.lens if with_lens else None
    if lens is not None:
        _check_licenses(lens, set(allow_licenses))
    path = lm.path / CARD
    card = path.read_text(encoding="utf-8") if path.is_file() else card_of(lm, name, lens)
    with tempfile.TemporaryDirectory() as directory:
        files = _files_of(lm, lens, Path(directory))
        url = "" if dry_run else _upload(name, private, files, card)
    return Pushed(url, card, (CARD, *files))


def _check_licenses(lens: Lens, allowed: set[str]) -> None:
    refused = {
        license: share
        for license, share in lens.shares("license").items()
        if license not in allowed and (not OPEN.search(license) or RESTRICTED.search(license))
    }
    if refused:
        parts = ", ".join(f"{license} ({share:.1%} of it)" for license, share in refused.items())
        options = " ".join(f"--allow-license {license!r}" for license in refused)
        raise InputError(
            f"the lens {lens.name} holds text whose licence may forbid passing it on: {parts}. "
            f"Push without the lens (--no-lens), or, where you may share it, with {options}."
        )


def _files_of(lm: OpenedModel, lens: Lens | None, changed: Path) -> dict[str, Path]:
    """Return the files to upload by name; those that differ from the model's go to ``changed``."""
    files = {
        path.relative_to(lm.path).as_posix(): path
        for pattern in UPLOADED
        for path in sorted(lm.path.glob(pattern))
        if path.is_file()
    }
    for name in files.keys() & {MODEL_FILE, ADAPTER_CONFIG} | {MODEL_FILE}:
        files[name] = changed / Path(name).name
        write_json(files[name], _without_paths(read_json(lm.path / name)))
    if lens is not None:
        lens.files.check_local("push")
        folder = f"lens/{lens.name}"
        names = (*lens.meta.files, PROTOTYPES_FILE)
        files |= {f"{folder}/{name}": lens.path / name for name in sorted(names)}
        write_meta(changed, replace(lens.meta, corpus_path=lens.meta.corpus_name))
        files[f"{folder}/{META_FILE}"] = changed / META_FILE
    return files


def _without_paths(value: Any) -> Any:
    """Return JSON with each absolute path replaced by its last part."""
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value


def _upload(name: str, private: bool, files: dict[str, Path], card: str) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi

    if silent := hub_error():
        raise InputError(f"{name} was not uploaded: {silent}.")
    try:
        api = HfApi()
        # Without the option, an organisation's default applies.
        url = api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.model_info(name).private:
            raise InputError(
                f"{name} is public, and --private was asked for: make it private on the hub, or "
                "push without --private."
            )
        operations = [CommitOperationAdd(at, str(path)) for at, path in files.items()]
        if not api.file_exists(name, CARD):
            operations.append(CommitOperationAdd(CARD, card.encode()))
        api.create_commit(name, operations, commit_message="Upload a prismlm model")
    except InputError:
        raise
    except Exception as error:  # the client raises OSError, its own errors and others
        raise InputError(
            f"{name} was not uploaded: {first_line(error).rstrip('.')}. Log in with `hf auth "
            "login`, with a token that has write access."
        ) from error
    return str(url)


def card_of(lm: OpenedModel, name: str, lens: Lens | None) -> str:
    """Return a model card, in Markdown, from the metadata of a model directory."""
    meta, head = _without_paths(read_json(lm.path / MODEL_FILE)), lm.head
    base, quality = meta["base"]["name"], (meta.get("provenance") or {}).get("quality")
    parameters = sum(weight.numel() for weight in lm.model.parameters())
    note = "The head changes no prediction: transformers opens the same model without it."
    if (lm.path / UNCERTAINTY_FILE).is_file():
        note = "It uses uncertainty feedback, which only prismlm applies."
    parts = [
        "---\nlibrary_name: prismlm\ntags: [prismlm, interpretability, data-attribution]\n"
        + (f"base_model: {base}\n" if NAME.fullmatch(base) else "")
        + f"---\n\n# {name.split('/')[1]}",
        f"This is {f'`{base}`' if base else 'a model'} of {parameters:,} parameters with a "
        "prototype head: every logit splits exactly into the parts of "
        f"{head.prototypes_per_token} of {head.num_prototypes:,} prototypes and a residual, and "
        f"each prototype leads to training text. {note}",
        f'```python\nimport prismlm\n\nlm = prismlm.load("{name}")\n'
        'trace = lm.explain("Your text", generate=20)\n'
        'trace.documents(10)\ntrace.sources(by="license")\n```',
    ]
    if quality:
        parts.append(
            f"On {quality['tokens']:,} tokens of held-out text, the model has a cross-entropy of "
            f"{quality['ce']:.3f} nats a token, its prototypes alone "
            f"{quality['prototype_only_ce']:.3f}, with the same top token for "
            f"{quality['agreement']:.1%}."
        )
    if lens is None:
        parts.append("It comes without text: build a lens with `prismlm index`.")
    else:
        parts += ["## The text behind its answers", *_text(lens)]
    parts.append(
        "A share is the part of a prediction's evidence on this text, by the model's own hidden "
        "states. It does not prove that the answer would differ without the text."
    )
    if lens is not None and lens.meta.trained_on is not True:
        parts.append("Training text that the lens does not hold is not shown.")
    return "\n\n".join(parts) + "\n"


def _text(lens: Lens) -> Iterator[str]:
    meta = lens.meta
    yield (
        f"The lens `{lens.name}` holds {meta.size()} ({meta.corpus_name}). Was the model trained "
        f"on them: {trained_on_words(meta.trained_on, meta.split)}. The lens contains this text, "
        "under its own licences:"
    )
    for column in ("source", "license"):
        shares = list(lens.shares(column).items())
        rows = [f"| {key} | {share:.1%} |" for key, share in shares[:MAX_ROWS]]
        if rest := shares[MAX_ROWS:]:
            rows.append(f"| {len(rest)} others | {sum(share for _, share in rest):.1%} |")
        yield "\n".join([f"| {column} | share of the text |", "| --- | --- |", *rows])
