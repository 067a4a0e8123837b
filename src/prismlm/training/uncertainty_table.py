"""Training a table of uncertainty codes for a model that exists, whose weights stay as they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from prismlm import fingerprints
from prismlm.corpus.packing import pack
from prismlm.corpus.store import Corpus
from prismlm.models.evaluating import evaluating
from prismlm.models.uncertainty_feedback import CODES, attach_uncertainty, uncertainty_of
from prismlm.ops.uncertainty_feedback import NO_CODE, shuffle_codes
from prismlm.progress import SILENT, Reporter
from prismlm.training.evaluation import HeldOut
from prismlm.training.isolation import keeps_documents_apart
from prismlm.training.loop import batches
from prismlm.training.lora import Adapting, TuningOptions

SEED = 0


@dataclass(frozen=True)
class TableOptions(TuningOptions):
    """How a table is trained: 64 rows, interpolated, from zero, with two passes.

    Attributes:
        epochs, learning_rate, batch, seed: see :class:`TuningOptions`.
    """

    learning_rate: float = 3e-3


def train_table(
    model: PreTrainedModel,
    corpus: Corpus,
    options: TableOptions,
    saved: Path,
    *,
    window: int,
    bf16: bool = False,
    progress: Reporter = SILENT,
) -> list[dict[str, float]]:
    """Put a table into a model, and train it alone on the documents that a corpus trains on.

    Args:
        model: what it is put into; its own weights are frozen.
        corpus: of its tokenizer.
        options: see :class:`TableOptions`.
        saved: a file that training goes on from after an interrupt.
        window: tokens of a row.
        bf16: compute in bfloat16 (autocast).
        progress: shows steps done.

    Returns:
        One row of losses every fifty steps.

    Raises:
        InputError: the corpus has nothing to train on, or the model can have no feedback.
        DivergenceError: the loss is not finite.
        FormatError: ``saved`` is damaged.
        Interrupted: SIGINT or SIGTERM came; what was learned is saved.
    """
    earlier = uncertainty_of(model)
    if earlier is not None:
        # Saved by a run that was cut off; what it learned is in ``saved`` too.
        earlier.detach()
    identity = {"model": fingerprints.of_model(model), "corpus": corpus.fingerprint}
    rows = pack(
        corpus, corpus.split("train"), window, options.seed, share_rows=keeps_documents_apart(model)
    )
    model.requires_grad_(False)
    table = attach_uncertainty(model).embedding
    dtype = table.weight.dtype
    # Steps of Adam are smaller than what bfloat16 tells apart.
    table.float().requires_grad_(True)
    model.train()
    training = Adapting(model, model, rows, options, saved, identity, bf16=bf16)
    training.resume()
    training.run(
        batches(len(rows), options.batch, training.step, training.steps, options.seed),
        "Training the table of uncertainty codes",
        "ce",
        progress=progress,
    )
    model.eval()
    table.to(dtype).requires_grad_(False)
    return training.history


@torch.no_grad()
def effect_of_table(model: PreTrainedModel, text: HeldOut, tokens: int) -> dict[str, float]:
    """Return the cross-entropy of held-out text, nats a token, by what is fed back.

    ``ce`` with the model's own codes; ``ce_without`` with none, as it was before; ``ce_shuffled``,
    the control, with its codes at other positions of a batch.
    """
    generator = torch.Generator().manual_seed(SEED)
    sums, count = dict.fromkeys(("ce", "ce_without", "ce_shuffled"), 0.0), 0
    with evaluating(model):
        for batch in text.batches(tokens):
            ids, attended, scored = batch.scored_on(model.device)
            given = {"input_ids": ids, "attention_mask": attended, "use_cache": False}
            output = model(**given)
            own: Tensor = output[CODES]
            others = (torch.full_like(own, NO_CODE), shuffle_codes(own, generator))
            each = [output.logits, *(model(**given, **{CODES: codes}).logits for codes in others)]
            count += int(scored.sum())
            for name, logits in zip(sums, each, strict=True):
                chosen = logits[:, :-1][scored].float()
                sums[name] += float(F.cross_entropy(chosen, ids[:, 1:][scored], reduction="sum"))
    return {name: total / count for name, total in sums.items()} | {"tokens": count}
