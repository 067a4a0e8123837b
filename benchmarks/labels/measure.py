"""What the names of prototypes are worth, beside those of their signatures and shuffled ones.

    python -m benchmarks.labels.measure MODEL --called NAME
    python -m benchmarks.render labels

With ``--asked`` nothing is measured: what ``prismlm label MODEL --endpoint URL --json`` printed is
put beside the others. MODEL has a lens with cells whose corpus is there. Nothing of it is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

import prismlm
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus
from prismlm.files import read_json, write_json
from prismlm.lens.labels import contexts
from prismlm.lens.labels.contexts import Label, shares
from prismlm.lens.labels.write import SEED, Labelling, Scores, described, make_labels, score_labels
from prismlm.lens.signatures import SEEN, signatures_of
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of

DRAWN = 24
WINDOWS, WINDOW, SKIPPED = 16, 256, 56


def main() -> None:
    """Name, score, and add the model to the result."""
    parser = script_options(__doc__, RESULTS / "labels.json")
    parser.add_argument("model", type=Path)
    parser.add_argument("--called", default="the demo's model", help="the model, on the page")
    parser.add_argument("--asked", type=Path, help="JSON of prismlm label with an endpoint")
    parser.add_argument("--server", help="what answered there, on the page")
    args = parser.parse_args()
    result: dict[str, Any] = read_json(args.out) if args.out.is_file() else {"models": []}
    if args.asked is not None:
        printed = read_json(args.asked)
        asked = {"model": args.called, "by": printed["source"].removeprefix("endpoint:")}
        asked["server"] = args.server
        result["asked"] = {**asked, **printed["asked"]}
        write_json(args.out, result)
        return
    lm = prismlm.load(args.model)
    lens = lm.lens
    if lens is None or lens.cells is None or lens.corpus is None:
        raise SystemExit(f"{args.model} has no lens with cells whose corpus is there")
    made = make_labels(lens, lm.model)
    scores = score_labels(made.labels, made.text, made.held_out)
    with patch.object(contexts, "distinctiveness", class_tf_idf):
        weighed = make_labels(lens, lm.model)
    others = score_labels(weighed.labels, weighed.text, weighed.held_out)
    former = by_signature(lm, lens.corpus, made)
    signatures = score_labels(former, made.text, made.held_out)
    result_of_model = {
        "model": args.called,
        "prototypes": len(made.labels),
        "documents": made.documents,
        "positions": len(lens.cells),
        "names": described(scores),
        "class_tf_idf": described(others),
        "signatures": described(signatures),
        "tokens": told_by_tokens(lm, lens.corpus, SEED),
        "drawn": drawn(made.labels, scores, former),
        "environment": environment(),
    }
    models = {one["model"]: one for one in result["models"]} | {args.called: result_of_model}
    write_json(args.out, {**result, "models": list(models.values())})


def class_tf_idf(count: sparse.csr_matrix, places: np.ndarray) -> sparse.csr_matrix:
    """Return tf ln(1 + A / f) of each word in each cell (Grootendorst 2022, as BERTopic does).

    tf is the word's share of the cell's words, f how often it is in all cells and A how many words
    a cell has in the mean.
    """
    frequency = np.asarray(count.sum(0)).ravel()
    mean = frequency.sum() / max(1, int((places > 0).sum()))
    score = shares(count, np.asarray(count.sum(1)).ravel())
    score.data *= np.log1p(mean / frequency[score.indices]).astype(np.float32)
    return score


def by_signature(lm: prismlm.PrismLM, corpus: Corpus, made: Labelling) -> list[Label | None]:
    """Return the names that a lens without labels has, for the same prototypes."""
    seen = np.bincount(corpus.tokens(0, corpus.num_tokens), minlength=len(weight_of(lm.model)))
    names = signatures_of(lm.model, lm.head, corpus, seen).names
    return [
        None if label is None else Label(name, "", "", "", ())
        for name, label in zip(names, made.labels, strict=True)
    ]


def drawn(
    labels: Sequence[Label | None], scores: Scores, signatures: Sequence[Label | None]
) -> list[dict[str, Any]]:
    """Return named prototypes drawn by seed, in order of their number."""
    named = [number for number, label in enumerate(labels) if label is not None]
    chosen = np.random.default_rng(SEED).choice(named, min(DRAWN, len(named)), replace=False)
    rows: list[dict[str, Any]] = []
    for number in sorted(chosen.tolist()):
        label, signature = labels[number], signatures[number]
        assert label is not None
        assert signature is not None
        score = float(scores.detection[number])
        row = {"prototype": number, "name": label.name, "signature": signature.name}
        rows.append(row | {"detection": None if np.isnan(score) else score})
    return rows


@torch.no_grad()
def told_by_tokens(lm: prismlm.PrismLM, corpus: Corpus, seed: int) -> dict[str, Any]:
    """Do the ten tokens of a prototype contain what is predicted where it is used?

    Of predictions of the lens's own text, the prototype with the most evidence for the model's top
    token is asked: is that token among its ten? The control asks another prototype's ten.
    """
    weight, prototypes = weight_of(lm.model).detach().float(), lm.head.prototypes.detach().float()
    seen = np.bincount(corpus.tokens(0, corpus.num_tokens), minlength=len(weight))
    telling = signatures_of(lm.model, lm.head, corpus, seen).ids
    count = telling.shape[1]
    largest = [(part @ weight.T).topk(count).indices for part in prototypes.split(256)]
    kinds = {"telling": telling, "largest": torch.cat(largest)}
    top, used = _predictions(lm, corpus, weight, prototypes)
    other = torch.randperm(len(prototypes), generator=torch.Generator().manual_seed(seed))
    rare = torch.from_numpy(seen < SEEN)
    return {"predictions": len(top)} | {
        name: {
            "has": _share(ids[used] == top[:, None]),
            "another_has": _share(ids[other[used]] == top[:, None]),
            "rare": rare[ids].float().mean().item(),
        }
        for name, ids in kinds.items()
    }


def _share(hits: Tensor) -> float:
    return hits.any(1).float().mean().item()


def _predictions(
    lm: prismlm.PrismLM, corpus: Corpus, weight: Tensor, prototypes: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the most likely token of predictions, and the prototype with most evidence for it."""
    top: list[Tensor] = []
    used: list[Tensor] = []
    step = (corpus.num_tokens - WINDOW) // WINDOWS
    for number in range(WINDOWS):
        ids = torch.from_numpy(corpus.read_tokens(number * step, WINDOW).astype("int64"))
        with capture(lm.model, logits=False) as caught:
            lm.model(input_ids=ids[None], use_cache=False)
        z = caught.z[0, SKIPPED:].float()
        routing, best = lm.head.nearest(z), (z @ weight.T).argmax(1)
        logits = (weight[best][:, None] @ prototypes[routing.indices].transpose(1, 2))[:, 0]
        evidence = routing.activations * logits
        top.append(best)
        used.append(routing.indices.gather(1, evidence.argmax(1, keepdim=True))[:, 0])
    return torch.cat(top), torch.cat(used)


if __name__ == "__main__":
    main()
