"""Train decoders of a laptop's size with and without uncertainty feedback, on stories.

    python -m benchmarks.signal_noise_attention.measure stories corpus TEXTS.parquet …
    python -m benchmarks.uncertainty_feedback.measure stories train --seed 0        # and 1, 2
    python -m benchmarks.uncertainty_feedback.measure stories levels --seed 0       # and 1, 2
    python -m benchmarks.uncertainty_feedback.measure stories literal --seed 0 \\
        --out docs/results/uncertainty_literal                                      # and 1, 2
    python -m benchmarks.render uncertainty_feedback

Every model sees the same rows in the same order for as many steps, with the same peak rate, and
begins with the weights of the same seed: those of signal/noise attention, so that the runs
without feedback can be compared with the ones there. The control is trained with the table and
the codes of two passes, but permuted over all positions of a batch. ``literal`` trains as the
source's pseudo-code is read literally, with the codes of the batch before, and its control.

One JSON file per run in docs/results/uncertainty_feedback/. A run whose file is there is not run
again, and one that was cut short goes on from its last checkpoint in ``--work``, where the trained
models stay, those of 65,536 levels with 200 MB each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.prototype_mixer.measure import Settings, measure
from benchmarks.shared.options import RESULTS, training_options
from benchmarks.signal_noise_attention.measure import LENGTH, STEPS, on_stories, slug
from prismlm.corpus import Corpus
from prismlm.corpus.windows import WindowBatch, document_windows, window_batches
from prismlm.files import read_json, write_json
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.uncertainty_feedback import codes_fed_back, uncertainty_of
from prismlm.ops.uncertainty_feedback import NO_CODE, normalised_entropy, quantise, shuffle_codes
from prismlm.statistics import bootstrap
from prismlm.training.setup import PreviousBatch

WINDOWS, SAMPLE = 384, 64
SEED = 0
TOKENS_PER_BATCH = 4096
PLAIN, NEUTRAL, OWN = "no feedback", "neutral", "2 passes"
ZERO, SHUFFLED, RECURSION = "zero", "shuffled", "token by token"
PREVIOUS = "previous batch"
Figures = dict[str, Any]

MODEL: Settings = {"preset": "llama-laptop"}
LEVELS = 65536
# Rows of the tables between whose rows codes are interpolated.
INTERPOLATED = 64


def fed(levels: int = LEVELS, **more: Any) -> Settings:
    """Return the section ``uncertainty_feedback`` of a recipe: two passes, a drawn row a code."""
    drawn = {"rows": None, "deviation": None}
    return {"enabled": True, "levels": levels, "passes": 2} | drawn | more


# Each arm's feedback; None for none.
TRAIN: dict[str, Settings | None] = {
    "no feedback": None,
    "two passes": fed(),
    "shuffled": fed(signal="shuffled"),
    "one pass": fed(passes=1),
}
SWEEP: dict[str, Settings | None] = {
    "65,536 levels, interpolated": fed(rows=INTERPOLATED),
    "interpolated, shuffled": fed(rows=INTERPOLATED, signal="shuffled"),
    "interpolated, from zero": fed(rows=INTERPOLATED, deviation=0.0),
    "interpolated, from zero, shuffled": fed(rows=INTERPOLATED, deviation=0.0, signal="shuffled"),
    "4,096 levels": fed(4096),
    "256 levels": fed(256),
}
LITERAL: dict[str, Settings | None] = {
    "no feedback": None,
    "previous batch": fed(passes=1, signal="previous_batch"),
}
PARTS = {"train": TRAIN, "levels": SWEEP, "literal": LITERAL}


def main() -> None:
    """Make every run of a part that has no result yet."""
    parser = training_options(
        __doc__, PARTS, work="uncertainty-runs", out=RESULTS / "uncertainty_feedback"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name, feedback in PARTS[args.part].items():
        result = args.out / f"{slug(name)}-{args.seed}.json"
        if result.is_file():
            print(f"{result.name} is there")
            continue
        settings = recipe_of(feedback, args.corpus, args.seed)
        run(name, settings, args.work / f"{slug(name)}-{args.seed}", result)


def recipe_of(feedback: Settings | None, corpus: Path, seed: int) -> Settings:
    """Return the recipe of a run, but for where it is written."""
    settings: Settings = {"corpus": str(corpus), "seed": seed, "steps": STEPS, "model": MODEL}
    more = {"uncertainty_feedback": feedback} if feedback else {}
    return on_stories(settings, LENGTH) | more


def run(name: str, settings: Settings, work: Path, result: Path) -> None:
    """Train, validate by signal, and write the figures."""
    # Kept until the model is validated, so that training is not measured again.
    measured = work.with_name(f"{work.name}.json")
    measure({"arm": name}, settings, work, measured)
    row = read_json(measured)
    model, _ = read_checkpoint(work)
    if (feedback := uncertainty_of(model)) is not None:
        # The table is counted by itself.
        row["table"] = {"parameters": feedback.embedding.weight.numel()}
        row["parameters"] -= row["table"]["parameters"]
    row["validation"] = validate(model, Corpus.open(Path(settings["corpus"])), LENGTH)
    write_json(result, row)
    losses = row["validation"]["all"]["losses"]
    print(f"{result.name}: {', '.join(f'{k} {v:.4f}' for k, v in losses.items())}", flush=True)


# -- held-out loss by what signal a model is fed


class Scores:
    """Summed losses of each document, by signal."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[int, float]] = {}
        self.tokens: dict[int, int] = {}
        self.windows = 0

    def add(self, batch: WindowBatch, losses: dict[str, Tensor]) -> None:
        """Add the predictions of a batch whose target is a token of the same window."""
        scored = batch.attention_mask[:, 1:] & batch.owned[:, :-1]
        for row, document in enumerate(batch.document.tolist()):
            self.windows += 1
            count = int(scored[row].sum())
            self.tokens[document] = self.tokens.get(document, 0) + count
            for name, of_tokens in losses.items():
                of_documents = self.sums.setdefault(name, {})
                loss = of_tokens[row][scored[row]].double().sum().item()
                of_documents[document] = of_documents.get(document, 0.0) + loss

    def to_dict(self, baseline: str) -> Figures:
        """Return nats per token of every signal, and its difference from a baseline."""
        tokens = np.array(list(self.tokens.values()), dtype=np.float64)
        sums = {
            name: np.array([losses[document] for document in self.tokens])
            for name, losses in self.sums.items()
        }
        return {
            "windows": self.windows,
            "documents": len(tokens),
            "tokens": int(tokens.sum()),
            "losses": {name: float(total.sum() / tokens.sum()) for name, total in sums.items()},
            "differences": {
                name: _difference(total - sums[baseline], tokens)
                for name, total in sums.items()
                if name != baseline
            },
        }


def _difference(more: np.ndarray, tokens: np.ndarray) -> Figures:
    """Return a difference per token with its 95 % interval over resampled documents."""
    interval = bootstrap(more, tokens, seed=SEED)
    return {"mean": interval.value, "low": interval.low, "high": interval.high}


def validate(model: PreTrainedModel, corpus: Corpus, length: int) -> Figures:
    """Return the loss of held-out windows by signal; of a small sample also token by token."""
    model.eval()
    feedback = uncertainty_of(model)
    levels = 2 if feedback is None else feedback.embedding.levels
    parts: dict[str, Scores] = {}
    for part, batches in zip(("all", "sample"), windows(corpus, length), strict=True):
        scores = parts[part] = Scores()
        shuffled, before = torch.Generator().manual_seed(SEED), PreviousBatch(levels)
        for batch in batches:
            fed = by_signal(model, batch, shuffled, before)
            if feedback is not None and part == "sample":
                fed[RECURSION] = token_by_token(model, batch.input_ids)
            scores.add(batch, fed)
    if feedback is None:
        return {part: scores.to_dict(PLAIN) for part, scores in parts.items()}
    return {"all": parts["all"].to_dict(OWN), "sample": parts["sample"].to_dict(RECURSION)}


def windows(corpus: Corpus, length: int) -> list[Iterator[WindowBatch]]:
    """Return the batches of all windows, and of the sample, which is the first drawn of them."""
    documents = corpus.split("heldout")
    grid = document_windows(documents, corpus.starts, corpus.lengths, length, length)
    order = np.random.default_rng(SEED).permutation(np.flatnonzero(grid.length > 1))
    return [
        window_batches(grid.take(order[:count]), corpus, TOKENS_PER_BATCH)
        for count in (WINDOWS, SAMPLE)
    ]


@torch.no_grad()
def by_signal(
    model: PreTrainedModel,
    batch: WindowBatch,
    generator: torch.Generator,
    before: PreviousBatch,
) -> dict[str, Tensor]:
    """Return the losses [B, T − 1] by signal; a model without feedback has none to choose from."""
    ids, mask = batch.input_ids, batch.attention_mask.long()

    def run(codes: Tensor | None = None) -> Any:
        given = {} if codes is None else {"uncertainty_codes": codes}
        return model(input_ids=ids, attention_mask=mask, use_cache=False, **given)

    feedback = uncertainty_of(model)
    if feedback is None:
        return {PLAIN: _losses(run().logits, ids)}
    feedback.passes = 1
    output = run()
    codes: Tensor = output.uncertainty_codes
    losses = {NEUTRAL: _losses(output.logits, ids)}
    predicted = quantise(normalised_entropy(output.logits), feedback.embedding.levels)
    own: Tensor = codes_fed_back(codes, predicted)
    losses[OWN] = _losses(run(own).logits, ids)
    losses[ZERO] = _losses(run(torch.full_like(own, NO_CODE)).logits, ids)
    losses[SHUFFLED] = _losses(run(shuffle_codes(own, generator)).logits, ids)
    output = run(before(own))
    before.remember(output.logits)
    return losses | {PREVIOUS: _losses(output.logits, ids)}


@torch.no_grad()
def token_by_token(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the losses of a model as it generates: each token has the code of the one before.

    Padding follows the text, so that no token of the text sees it.
    """
    losses: list[Tensor] = []
    cache = None
    for at in range(ids.shape[1] - 1):
        output: Any = model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits = output.logits[:, 0].float()
        losses.append(F.cross_entropy(logits, ids[:, at + 1], reduction="none"))
    return torch.stack(losses, 1)


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    targets = ids[:, 1:]
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none"
    )
    return losses.view_as(targets)


if __name__ == "__main__":
    main()
