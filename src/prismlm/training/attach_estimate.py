"""What attaching a head would take: a pass and a few steps are timed, and multiplied."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from prismlm.corpus.estimate import built, draw
from prismlm.corpus.read import DocumentReader
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import check_tokenizer
from prismlm.corpus.windows import split_counts
from prismlm.cost import Cost, peak_memory, seconds_of
from prismlm.index.positions import probabilities, screening_weight
from prismlm.index.states import HiddenStates, Writer, bytes_per_position, pass_tokens
from prismlm.index.write import lens_bytes
from prismlm.layers import PrototypeHead
from prismlm.models.base import find_base, put_base
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.device import device_named, uses_bf16
from prismlm.models.evaluating import evaluating
from prismlm.models.seam import capture
from prismlm.models.uncertainty_feedback import attach_uncertainty
from prismlm.training.attach_options import AttachOptions, index_options, window_of
from prismlm.training.fit import KMEANS_ITERATIONS, STATES_PER_CLUSTER, Fitting
from prismlm.training.lora import check_lora, with_adapters

STEPS_MEASURED = 3
# Windows overlap by a quarter.
READ_TWICE = 4 / 3


def estimate_attach(
    model: str, corpus: Sequence[Path | str], options: AttachOptions | None = None
) -> Cost:
    """Say what :func:`prismlm.training.attach.attach` with the same arguments would take.

    Nothing is written but for a model that has to be fetched, to the hub's cache. The figures are
    ``tokens``, positions of the corpus; ``states`` that the head is fitted to, in ``steps``;
    what the seconds are made of: ``tune_seconds`` of fine-tuning, ``read_seconds`` of hidden
    states, ``fit_seconds`` of the head, ``lens_seconds``; and what the disk is: ``states_bytes``
    while they are needed, and ``lens_bytes``.

    Raises:
        InputError: the model or corpus cannot be used.
    """
    options = options or AttachOptions()
    device = device_named(options.device)
    with tempfile.TemporaryDirectory() as name:
        opened, tokenizer = _opened(model, options, Path(name) / "model", device)
        # Two passes, in all that follows.
        feedback = None if options.uncertainty is None else attach_uncertainty(opened)
        window = window_of(opened, options)
        documents, tokens = _counts(corpus, tokenizer, options)
        per_token, kept = _read(opened, window, Path(name), options, device)
        row = bytes_per_position(kept.width)
        states = max(1, min(tokens, int(options.states_gb * 1e9 / row)))
        options = replace(options, fit=options.fit.of_states(states))
        fitting = Fitting(opened, kept, options.fit, _head(kept, options, device), Path(name))
        fitting.begin()
        rows = torch.arange(min(options.fit.batch, len(kept))).numpy()
        per_step = seconds_of(lambda: fitting.take(rows), STEPS_MEASURED)
        per_position = _lens(opened, fitting.head, kept)
        tuning = 0.0
        if options.uncertainty is not None and feedback is not None:
            opened.requires_grad_(False)
            feedback.embedding.requires_grad_(True)
            tuning += options.uncertainty.epochs * _tuning(opened, window)
        if options.lora is not None:
            check_lora()
            tuning += options.lora.epochs * _tuning(with_adapters(opened, options.lora), window)
    steps = options.fit.steps(states)
    unread = max(0, tokens - states) * per_token * READ_TWICE
    clustered = min(states, STATES_PER_CLUSTER * fitting.head.num_prototypes) * KMEANS_ITERATIONS
    placing = clustered * per_position / 2
    seconds = {
        "tune_seconds": tokens * tuning,
        "read_seconds": states * per_token * READ_TWICE,
        "fit_seconds": placing + steps * per_step,
        "lens_seconds": unread + tokens * per_position,
    }
    disk = {
        "states_bytes": states * row,
        "lens_bytes": lens_bytes(fitting.head, index_options(options, window), documents, tokens),
    }
    return Cost(
        sum(seconds.values()),
        peak_memory(device),
        sum(disk.values()),
        {"tokens": tokens, "states": states, "steps": steps, **seconds, **disk},
        basis="Measured on one forward pass and a few steps.",
    )


def _opened(model: str, options: AttachOptions, converted: Path, device: str) -> tuple[Any, Any]:
    """Return model and tokenizer, from where they are; a GGUF file has to be converted."""
    base = find_base(model, options.revision)
    if base.is_gguf:
        put_base(base, converted)
    return read_checkpoint(converted if base.is_gguf else base.path, device=device)


def _counts(
    corpus: Sequence[Path | str], tokenizer: Any, options: AttachOptions
) -> tuple[int, int]:
    """Return the documents to train on, and their positions: of text files, from a sample."""
    if len(corpus) == 1 and (Path(corpus[0]) / "corpus.json").is_file():
        documents, tokens = split_counts(Corpus.open(Path(corpus[0])), "train")
        return documents, tokens - documents
    check_tokenizer(tokenizer, tokenizer.name_or_path)
    reader = DocumentReader(
        list(corpus),
        tokenizer=tokenizer,
        skip_bad_rows=options.skip_bad_rows,
        answered_chats=True,
    )
    sample = draw(reader)
    with built(sample, tokenizer) as first:
        documents, tokens = split_counts(first, "train")
    scale = sample.scale or 1.0
    return round(scale * documents), round(scale * (tokens - documents))


def _read(
    model: Any, window: int, directory: Path, options: AttachOptions, device: str
) -> tuple[float, HiddenStates]:
    """Return the seconds of a position in a forward pass, and the states of one."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    shape = (max(1, pass_tokens(model.device) // window), window)
    ids = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(device)
    bf16 = uses_bf16(options.precision, device)
    with (
        evaluating(model),
        torch.autocast(device, torch.bfloat16, enabled=bf16),
        capture(model, logits=False) as seen,
    ):
        seconds = seconds_of(lambda: model(input_ids=ids, use_cache=False), 1)
    z = seen.z.flatten(0, 1).bfloat16().cpu()
    with Writer(directory / "states", {}, z.shape[1]) as writer:
        writer.add(z, ids.flatten().cpu())
        writer.end_block()
    return seconds / ids.numel(), HiddenStates.open(directory / "states")


def _head(states: HiddenStates, options: AttachOptions, device: str) -> PrototypeHead:
    head = options.fit.head(states.width)
    head.reset_parameters(torch.Generator().manual_seed(0))
    return head.to(device)


@torch.no_grad()
def _lens(model: Any, head: PrototypeHead, states: HiddenStates) -> float:
    """Return the seconds that a position takes in the index when its state is there."""
    rows = torch.arange(min(512, len(states))).numpy()
    z, tokens = states.states(rows).to(model.device), states.tokens(rows).to(model.device)

    low = screening_weight(model)

    def position() -> None:
        head.nearest(z)
        probabilities(model, z.to(model.dtype), tokens, low)

    return seconds_of(position, 1) / len(rows)


def _tuning(model: Any, window: int) -> float:
    """Return the seconds that a token takes in training what is not frozen of a model."""
    ids = torch.zeros(1, window, dtype=torch.int64, device=model.device)
    return seconds_of(lambda: model(input_ids=ids, labels=ids).loss.backward(), 1) / window
