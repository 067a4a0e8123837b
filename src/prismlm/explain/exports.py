"""A head and the contexts of its lens, in the formats of SAELens and Neuronpedia."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from prismlm import fingerprints
from prismlm.corpus.pieces import pieces_of, token_alone
from prismlm.errors import InputError
from prismlm.files import atomic_directory, json_text, read_json
from prismlm.lens.lens import Lens
from prismlm.lens.opened_model import OpenedModel
from prismlm.models.sidecar import META_FILE, weight_of
from prismlm.ops.prototype_head.routing import unit_rows

# As in Neuronpedia's own exports.
FEATURES_IN_A_FILE = 1024
# Neuronpedia's name of its own account, which its importer expects as creator.
CREATOR = "clkht01d40000jv08hvalcvly"
LOGITS, NEAREST = 10, 10
PROTOTYPE_BATCH = 64
# The state that enters the output embedding, in a TransformerBridge of TransformerLens; its
# ln_final.hook_normalized comes before the gain of the last norm.
HOOK = "unembed.hook_in"


def export_sae_lens(lm: OpenedModel, directory: Path | str) -> None:
    """Write the head as a dictionary that SAELens loads, cfg.json and sae_weights.safetensors.

    ``import prismlm.models.sae_lens`` registers its architecture for ``SAE.load_from_disk``. Its
    features are the head's activations; with ``use_error_term`` the state passes unchanged.
    """
    try:
        from prismlm.models.sae_lens import PrototypeSAE
    except ImportError as error:
        raise InputError(f"{error}: install it with pip install 'prismlm[sae-lens]'.") from error
    dictionary = PrototypeSAE.from_head(lm.head, model_name=_base_of(lm), hook_name=HOOK)
    with _new(directory) as out:
        dictionary.save_model(out)


def export_neuronpedia(lm: OpenedModel, directory: Path | str) -> None:
    """Write prototypes and contexts of the lens as Neuronpedia's own exports are, for its importer.

    ``DIRECTORY/MODEL/SOURCE/`` has model, release, source set and source, and a line for each
    prototype, its names and its contexts. Activations are those of each context's own token; the
    others are not stored, and are 0.
    """
    lens = lm.lens_for("cards to export")
    base = Path(_base_of(lm)).resolve().name
    # Another head of this model, or another lens, is another source.
    digest = fingerprints.of_json([lens.meta.prototypes, lens.meta.corpus])[:8]
    name, layers = f"prismlm-{lens.num_prototypes}-{digest}", lm.model.config.num_hidden_layers
    model, source = base.lower(), f"{layers}-prismlm-{lens.num_prototypes}-{digest}"
    about = {"description": "The prototypes that prismlm splits every logit of this model into."}
    about |= {"creatorName": "prismlm"}
    size = {"layers": layers, "neuronsPerLayer": 0, "dimension": lm.head.width}
    frame: dict[str, dict[str, Any]] = {
        "model": {"id": model, "displayName": base, "displayNameShort": model, "owner": ""} | size,
        "release": {"name": name} | about,
        "sourceset": {"modelId": model, "name": name, "type": "Prototypes", "releaseName": name}
        | about,
        "source": {"id": source, "modelId": model, "setName": name},
    }
    keys = {"modelId": model, "layer": source}
    # The importer skips rows whose id it has, of whatever model.
    prefix = f"{model}-{source}"
    with _new(directory) as out:
        folder = out / model / source
        folder.mkdir(parents=True)
        for kind, row in frame.items():
            text = json_text({"creatorId": CREATOR} | row) + "\n"
            (folder / f"{kind}.jsonl").write_text(text, encoding="utf-8")
        for kind, rows in (
            ("features", _features(lm, lens, name)),
            ("explanations", _explanations(lens, prefix)),
            ("activations", _activations(lm, lens, prefix)),
        ):
            _write_batches(folder / kind, (keys | row for row in rows))


def _new(directory: Path | str) -> Any:
    if Path(directory).exists():
        raise InputError(f"{directory} exists already: choose a new directory.")
    return atomic_directory(directory)


def _base_of(lm: OpenedModel) -> str:
    return read_json(lm.path / META_FILE)["base"]["name"] or lm.path.resolve().name


def _features(lm: OpenedModel, lens: Lens, set_name: str) -> Iterator[dict[str, Any]]:
    bank, weight = lm.head.prototypes.detach().float(), weight_of(lm.model).detach().float()
    unit, centred = unit_rows(bank), weight - weight.mean(0)
    maxima = lens.index.group_by("prototype").aggregate([("activation", "max")]).to_pylist()
    max_activation = {row["prototype"]: row["activation_max"] for row in maxima}
    rows = lens.prototypes.to_pylist()
    for start in range(0, len(bank), PROTOTYPE_BATCH):
        batch = slice(start, start + PROTOTYPE_BATCH)
        logits = bank[batch] @ centred.T
        highest, lowest = (values.topk(min(LOGITS, len(weight))) for values in (logits, -logits))
        similar = (unit[batch] @ unit.T).topk(min(NEAREST + 1, len(unit)))
        for i, row in enumerate(rows[batch]):
            number = row["prototype"]
            yield {
                "index": str(number),
                "creatorId": CREATOR,
                "sourceSetName": set_name,
                "hookName": HOOK,
                "maxActApprox": max_activation.get(number, 0.0),
                "frac_nonzero": row["usage"],
                "pos_str": _words(lm, highest.indices[i]),
                "pos_values": _rounded(highest.values[i]),
                "neg_str": _words(lm, lowest.indices[i]),
                "neg_values": _rounded(-lowest.values[i]),
                "topkCosSimIndices": similar.indices[i].tolist(),
                "topkCosSimValues": _rounded(similar.values[i]),
                "hasVector": True,
                "vector": _rounded(bank[number]),
            }


def _words(lm: OpenedModel, tokens: Tensor) -> list[str]:
    return [token_alone(lm.tokenizer, token) for token in tokens.tolist()]


def _explanations(lens: Lens, prefix: str) -> Iterator[dict[str, Any]]:
    for row in lens.prototypes.to_pylist():
        if row["name"]:
            number = row["prototype"]
            yield {
                "id": f"{prefix}-{number}",
                "index": str(number),
                "authorId": CREATOR,
                "description": ": ".join(filter(None, (row["name"], row["description"]))),
                "notes": row["label_source"],
                "umap_x": row["x"],
                "umap_y": row["y"],
            }


def _activations(lm: OpenedModel, lens: Lens, prefix: str) -> Iterator[dict[str, Any]]:
    encode = partial(lm.tokenizer.encode, add_special_tokens=False)
    for number, row in enumerate(lens.index.to_pylist()):
        if row["token"] is None:
            continue
        before, after = (
            [piece.shown for piece in pieces_of(lm.tokenizer, encode(row[side] or ""))]
            for side in ("before", "after")
        )
        yield {
            "id": f"{prefix}-{number}",
            "index": str(row["prototype"]),
            "creatorId": CREATOR,
            "tokens": [*before, row["token"], *after],
            "values": [0.0] * len(before) + [row["activation"]] + [0.0] * len(after),
            "maxValue": row["activation"],
            "minValue": 0.0,
            "maxValueTokenIndex": len(before),
            "dataSource": row["source"],
        }


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.detach().tolist()]


def _write_batches(directory: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write the rows of each ``FEATURES_IN_A_FILE`` prototypes, which ascend, to one file."""
    directory.mkdir()
    for batch, group in groupby(rows, lambda row: int(row["index"]) // FEATURES_IN_A_FILE):
        text = "".join(json_text(row) + "\n" for row in group)
        (directory / f"batch-{batch}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
