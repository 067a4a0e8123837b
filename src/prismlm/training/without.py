"""Training again without some documents, as a model directory says that it was trained."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from prismlm.corpus.store import Corpus
from prismlm.errors import InputError
from prismlm.lens.opened_model import OpenedModel
from prismlm.models.base import adapter_updates, merge_adapter
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.device import uses_bf16
from prismlm.models.sidecar import load_sidecar
from prismlm.progress import SILENT, Reporter
from prismlm.training import tuning
from prismlm.training.attach import ADAPTER
from prismlm.training.recipe import build_recipe
from prismlm.training.run import train
from prismlm.training.tuning import LoraOptions


def train_without(
    lm: OpenedModel, doc_ids: Collection[str], *, progress: Reporter = SILENT
) -> PreTrainedModel:
    """Return a model trained as ``lm`` was, without documents of its lens's corpus.

    A model of ``prismlm train`` is trained by its recipe, to its head's last step; one of ``prismlm
    attach --lora`` has its adapter taken out, and another trained on the remaining documents. Seed
    and settings are the same; rows are packed anew, and the model of ``lm`` is not changed.

    Args:
        lm: the opened model, with a lens.
        doc_ids: ids of documents in the lens's corpus.
        progress: shows progress.

    Raises:
        InputError: the directory does not say how it was trained, or on a corpus that is not there.
    """
    provenance = load_sidecar(lm.path).provenance or {}
    attached: dict[str, Any] = provenance.get("attached") or {}
    read: dict[str, str] = attached.get("read") or provenance.get("corpus") or {}
    options = {
        field.name: attached[f"lora.{field.name}"]
        for field in fields(LoraOptions)
        if f"lora.{field.name}" in attached
    }
    if not provenance.get("recipe") and not (options and (lm.path / ADAPTER).is_dir()):
        raise InputError(
            f"{lm.path} does not say how it was trained on these documents: expected the recipe of "
            "`prismlm train`, or the adapter of `prismlm attach --lora`. Leave out --retrain for "
            "the estimates."
        )
    corpus = training_corpus(lm, read.get("fingerprint"))
    left_out = set(doc_ids)
    documents = [n for n, doc_id in enumerate(corpus.doc_ids) if doc_id in left_out]
    with tempfile.TemporaryDirectory() as name:
        if provenance.get("recipe"):
            places = {"corpus": corpus.path, "out": Path(name) / "model"}
            recipe = build_recipe({**provenance["recipe"], **places}, str(lm.path))
            train(recipe, without=documents, progress=progress)
            return read_checkpoint(recipe.out, device=lm.model.device.type)[0]
        model, adapter = untaught(lm), Path(name) / ADAPTER
        tuning.adapt(
            untaught(lm),
            corpus.without(documents),
            LoraOptions(**options),
            adapter,
            base=lm.path.name,
            window=attached["window"],
            bf16=uses_bf16(attached["precision"], lm.model.device.type),
            progress=progress,
        )
        merge_adapter(model, adapter)
        return model


def training_corpus(lm: OpenedModel, fingerprint: str | None) -> Corpus:
    """Return the corpus of the lens, if it is there and the one that the model was trained on."""
    lens = lm.lens_for("document to leave out")
    if lens.corpus is None:
        raise InputError(
            f"to train again, the corpus of the lens {lens.name} is needed, and {lens.corpus_path} "
            "is missing or was changed: say where it is with --corpus DIR."
        )
    if fingerprint != lens.meta.corpus:
        raise InputError(
            f"the lens {lens.name} is of another corpus than {lm.path} was trained on: choose the "
            "lens of its training text with --lens."
        )
    return lens.corpus


@torch.no_grad()
def untaught(lm: OpenedModel) -> PreTrainedModel:
    """Return another copy of the model, with its adapter taken out."""
    model, _ = read_checkpoint(lm.path, device=lm.model.device.type)
    for name, update in adapter_updates(model, lm.path / ADAPTER):
        weight = model.get_parameter(name)
        weight.copy_(weight.double() - update)
    return model
