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
from prismlm.errors import InputError, PrismError
from prismlm.lens.opened_model import OpenedModel
from prismlm.models.base import adapter_updates, find_base, merge_adapter
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
    and settings are the same, and rows are packed anew. InputError if the directory does not say
    how it was trained, or on a corpus that is not there.
    """
    provenance = load_sidecar(lm.path).provenance or {}
    attached: dict[str, Any] = provenance.get("attached") or {}
    names = [field.name for field in fields(LoraOptions) if f"lora.{field.name}" in attached]
    if not provenance.get("recipe") and not (names and (lm.path / ADAPTER).is_dir()):
        raise InputError(
            f"{lm.path} does not say how it was trained on these documents: expected the recipe of "
            "`train`, or the adapter of `attach --lora`. Leave out --retrain for the estimates."
        )
    read: dict[str, str] = attached.get("read") or provenance.get("corpus") or {}
    corpus, left_out = _corpus(lm, read.get("fingerprint")), set(doc_ids)
    documents = [n for n, doc_id in enumerate(corpus.doc_ids) if doc_id in left_out]
    with tempfile.TemporaryDirectory() as name:
        if provenance.get("recipe"):
            places = {"corpus": corpus.path, "out": Path(name) / "model"}
            # The settings of an earlier version's evaluations may be gone; they change no weight.
            settings = {**provenance["recipe"], **places, "evaluation": {}}
            recipe = build_recipe(settings, str(lm.path))
            # One process takes as many rows together as those that trained the model.
            rows = recipe.batch_size * provenance.get("processes", 1)
            recipe = recipe.model_copy(update={"batch_size": rows})
            train(recipe, without=documents, progress=progress)
            return read_checkpoint(recipe.out, device=lm.model.device.type)[0]
        model, adapter = untaught(lm), Path(name) / ADAPTER
        options = LoraOptions(**{name: attached[f"lora.{name}"] for name in names})
        how = {"window": attached["window"], "base": lm.path.name, "progress": progress}
        how["bf16"] = uses_bf16(attached["precision"], lm.model.device.type)
        tuning.adapt(untaught(lm), corpus.without(documents), options, adapter, **how)
        merge_adapter(model, adapter)
        return model


def _corpus(lm: OpenedModel, fingerprint: str | None) -> Corpus:
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
    """Return another copy of the model, with its adapter taken out.

    Weights in half precision do not say what they were before: they are read from the base.
    """
    model, base = read_checkpoint(lm.path, device=lm.model.device.type)[0], None
    named, reason = load_sidecar(lm.path).base, ""
    if any(weight.dtype.itemsize < 4 for weight in model.parameters()):
        try:
            base = read_checkpoint(find_base(named.name, named.revision).path)[0]
            load_sidecar(lm.path, base)
        except PrismError as error:
            reason = str(error).rstrip(".")
    for name, update in () if reason else adapter_updates(model, lm.path / ADAPTER):
        weight = model.get_parameter(name)
        before = weight.double() - update
        if base is not None:
            before = base.get_parameter(name).to(weight.device)
            if not torch.equal((before.double() + update).to(weight.dtype), weight):
                reason = f"with the adapter, {name} is not that of the model"
        weight.copy_(before)
    if reason:
        raise InputError(
            f"the weights of {lm.path} are in half precision, from which its adapter cannot be "
            f"taken out: expected the checkpoint {named.name} that was fine-tuned, but {reason}. "
            "Put it back there, or leave out --retrain for the estimates."
        )
    return model
