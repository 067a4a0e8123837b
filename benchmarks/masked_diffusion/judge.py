"""Head and evidence on a masked-diffusion decoder; writes docs/results/masked_diffusion.json.

    python -m benchmarks.masked_diffusion.judge planted diffusion

The head is fitted to the states of training text while it is masked; figures of it are of held-out
text. Facts and held-out documents are asked of the same methods, and judged by the same measures,
as for left-to-right models in ``benchmarks/attribution/``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from benchmarks.attribution.judge_planted import NAMED
from benchmarks.attribution.judges.passage_domains import passage_domain_share
from benchmarks.attribution.judges.passage_recall import document_recall
from benchmarks.attribution.judges.passages import (
    Method,
    PassageBank,
    Prediction,
    answer_scores,
    mean_with_error,
)
from benchmarks.attribution.methods.at_random import AtRandom, SameToken
from benchmarks.attribution.methods.evidence import Choices, EvidenceByPosition
from benchmarks.attribution.methods.explain import Explained, with_random_states
from benchmarks.attribution.methods.nearest import NearestStates
from benchmarks.attribution.methods.setting import Setting
from benchmarks.attribution.methods.words import ByWords
from benchmarks.attribution.questions import twin_recall
from benchmarks.masked_diffusion.facts import FACTS_FILE, QUESTIONS, asked
from benchmarks.masked_diffusion.model import (
    MaskedDiffusionLM,
    after_an_end,
    fill_in,
    from_left_to_right,
)
from benchmarks.masked_diffusion.positions import (
    READINGS,
    TOKENS_ASKED,
    TOKENS_PER_BATCH,
    MaskedSetting,
    cells_of,
    keep_states,
    masked_passes,
    of_document,
    of_question,
    positions_of,
    setting_of,
)
from benchmarks.masked_diffusion.train import TRAINING_FILE, WINDOW, maskable
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.shared.stored_states import measure_states
from prismlm.corpus import Corpus, document_windows, window_batches
from prismlm.explain.positions import TEMPERATURE
from prismlm.files import read_json, write_json
from prismlm.index.cells import Cells
from prismlm.layers import PrototypeHead
from prismlm.models.checkpoint import load_checkpoint
from prismlm.training.fit import FitOptions, fit

PROTOTYPES, PROTOTYPES_PER_TOKEN = 512, 16
ONE_SIDE, HIDDEN = "text on the right", "text on the right, masked too"
# Of a held-out text: what is read on the left, filled in, and read on the right.
LEFT, HOLE, RIGHT = 48, 12, 32
HOLES = 3
# Held-out documents that figures are of.
DOCUMENTS = 80
MASKED_ONE_IN = (8, 3, 2, 1)


def main() -> None:
    """Fit, judge, and write the result."""
    parser = script_options(__doc__, RESULTS / "masked_diffusion.json")
    parser.add_argument("planted", type=Path, help="what planted_model.py wrote")
    parser.add_argument("work", type=Path, help="what train.py wrote")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=float, default=2, help="of the head")
    arguments = parser.parse_args()
    work, seed = arguments.work, arguments.seed
    corpus, facts = Corpus.open(work / "corpus"), read_json(work / FACTS_FILE)
    model = MaskedDiffusionLM.from_pretrained(work / "model").eval()
    heldout = np.random.default_rng(seed).permutation(corpus.split("heldout"))[:DOCUMENTS]
    states, places = keep_states(work / "states", model, corpus, seed)
    options = FitOptions(
        PROTOTYPES,
        PROTOTYPES_PER_TOKEN,
        arguments.epochs,
        frequent=1500,
        drawn=500,
        weights="cosine",
        seed=seed,
    )
    head, _ = fit(model, states, options)
    bank = PassageBank.of(corpus, corpus.split("train"))
    positions = positions_of(head, states, places, bank)
    setting = setting_of(model, head, bank, positions)
    random = with_random_states(setting, seed)
    cells = cells_of(work / "cells", model, positions.cell, states, places, corpus)
    training, counts = read_json(work / TRAINING_FILE), corpus.meta["counts"]
    held = corpus.meta["heldout"]
    result = {
        "environment": environment(),
        "model": {"parameters": model.num_parameters(), "layers": model.config.num_hidden_layers},
        "training": training
        | {part: counts[part] - held[part] for part in ("documents", "tokens")},
        "masked": levels(model, arguments.planted, corpus, heldout, seed),
        "head": {"prototypes": PROTOTYPES, "prototypes_per_token": PROTOTYPES_PER_TOKEN}
        | {"epochs": arguments.epochs, "states": len(states), "readings": READINGS},
        "quality": {
            name: quality(model, of, corpus, heldout, seed)
            for name, of in (("trained", head), ("random states", random.head))
        },
        "sums": sums(setting, corpus, heldout, seed),
        "filled": filled(model, corpus, heldout),
        "known": known(setting, facts),
    }
    every = methods(setting, random, cells, seed)
    result["recall"] = recall(setting, every, facts)
    result["twins"] = mean_with_error(twin_recall(facts, NAMED))
    result["domains"] = domains(setting, every, heldout, seed)
    result["asked_tokens"] = TOKENS_ASKED
    write_json(arguments.out, result)
    print(f"wrote {arguments.out}")


def methods(setting: MaskedSetting, random: Setting, cells: Cells, seed: int) -> dict[str, Method]:
    """Return every method by its name on the page."""
    near = Choices(temperature=TEMPERATURE, cells=PROTOTYPES_PER_TOKEN)
    return {
        # No text stands before a token that is masked anywhere: each is by itself.
        "evidence by position": Explained(setting, cells, alone=True),
        "shuffled cells": Explained(setting, cells, shuffled=seed, alone=True),
        "random states as prototypes": EvidenceByPosition(random, near),
        "nearest states, whatever token": NearestStates(setting),
        "count of the token": SameToken(setting, counted=True),
        "BM25": ByWords(setting.bank),
        "random passages": AtRandom(setting.bank, seed),
    }


def levels(
    model: MaskedDiffusionLM, planted: Path, corpus: Corpus, heldout: np.ndarray, seed: int
) -> dict[str, Any]:
    """Return cross-entropies on held-out text, in nats a token, by the share that is masked.

    Beside them, on the same tokens: those of the left-to-right model with its mask opened and not
    trained on, and of the count of tokens in all the text that it read; and of that model itself.
    """
    read = Corpus.open(planted / "corpus")
    counts = torch.ones(model.mask_id)
    for number in read.split("train").tolist():
        tokens = read.tokens(int(read.starts[number]), int(read.lengths[number]))
        counts += torch.from_numpy(np.bincount(tokens, minlength=len(counts)))
    log_count = (counts / counts.sum()).log()
    before = load_checkpoint(planted / "model").model
    made = from_left_to_right(before).eval()
    shares: dict[str, dict[str, float]] = {}
    for readings in MASKED_ONE_IN:
        found: dict[str, list[Tensor]] = {"ce": [], "ce_before": [], "count_of_tokens": []}
        for name, decoder in (("ce", model), ("ce_before", made)):
            for one in masked_passes(decoder, corpus, heldout, seed, readings):
                logits = decoder.lm_head(one.z)
                missed = functional.cross_entropy(logits, one.token, reduction="none")
                found[name].append(missed.detach())
                if decoder is model:
                    found["count_of_tokens"].append(-log_count[one.token])
        shares[str(readings)] = {name: float(torch.cat(of).mean()) for name, of in found.items()}
    return {"one_in": shares, "left_to_right": left_to_right_ce(before, corpus, heldout)}


@torch.no_grad()
def left_to_right_ce(model: PreTrainedModel, corpus: Corpus, heldout: np.ndarray) -> float:
    """Return the cross-entropy of the tokens that may be masked, each after all before it."""
    grid = document_windows(heldout, corpus.starts, corpus.lengths, WINDOW, WINDOW)
    missed: list[Tensor] = []
    for batch in window_batches(grid, corpus, TOKENS_PER_BATCH, corpus.eos_token_id):
        logits = model(input_ids=after_an_end(model, batch.input_ids), use_cache=False).logits
        chosen = maskable(batch, corpus)
        targets = batch.input_ids[chosen]
        missed.append(functional.cross_entropy(logits[:, :-1][chosen], targets, reduction="none"))
    return float(torch.cat(missed).mean())


def quality(
    model: MaskedDiffusionLM, head: PrototypeHead, corpus: Corpus, heldout: np.ndarray, seed: int
) -> dict[str, Any]:
    """Return the figures of a head on held-out text, as much of it masked as for the states."""
    passes = masked_passes(model, corpus, heldout, seed)
    found = measure_states(model, head, ((read.z, read.token) for read in passes))
    return found.to_dict() | {"recovered": found.recovered}


def sums(setting: MaskedSetting, corpus: Corpus, heldout: np.ndarray, seed: int) -> dict[str, Any]:
    """Return by how much, at most, the parts of a masked token's logit miss the model's own."""
    count, largest = 0, 0.0
    for number in heldout[:20].tolist():
        text = of_document(corpus, number, setting.mask_id, seed)
        for prediction in {id(p.ids): p for p in text}.values():
            alike = [p for p in text if p.ids is prediction.ids]
            largest = max(largest, setting.split(alike).rounding)
            count += len(alike)
    return {"positions": count, "largest": largest}


def filled(model: MaskedDiffusionLM, corpus: Corpus, heldout: np.ndarray) -> list[dict[str, str]]:
    """Return holes in the first long held-out texts, as they were and as they are filled in."""
    found: list[dict[str, str]] = []
    whole = LEFT + HOLE + RIGHT
    for number in heldout.tolist():
        if len(found) < HOLES and corpus.lengths[number] > whole:
            ids = torch.from_numpy(corpus.tokens(int(corpus.starts[number]), whole).astype("i8"))
            read = ids.clone()
            read[LEFT : LEFT + HOLE] = model.mask_id
            written = fill_in(model, read, HOLE)
            pieces = (ids[:LEFT], ids[LEFT:-RIGHT], written[LEFT:-RIGHT], ids[-RIGHT:])
            names: tuple[str, ...] = ("before", "was", "filled", "after")
            texts = [str(corpus.tokenizer.decode(piece.tolist())) for piece in pieces]
            found.append(dict(zip(names, texts, strict=True)))
    return found


def questions(
    setting: MaskedSetting, facts: Sequence[dict[str, Any]], kind: str
) -> list[list[Prediction]]:
    """Return the predictions of each fact's answer."""
    corpus, hidden = setting.bank.corpus, kind == HIDDEN
    wording = QUESTIONS[ONE_SIDE if hidden else kind]
    texts = [asked(corpus, fact, wording) for fact in facts]
    return [of_question(text, setting.mask_id, hidden=hidden) for text in texts]


def known(setting: MaskedSetting, facts: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return how often the answer is likelier than what else it could have been, a token's mean."""
    found: dict[str, dict[str, float]] = {}
    chance = float(np.mean([1 / len(fact["candidates"]) for fact in facts]))
    for kind in (*QUESTIONS, HIDDEN):
        hits: list[bool] = []
        for fact in facts:
            others = [fact | {"answer": answer} for answer in fact["candidates"]]
            likely = [
                np.log(setting.ask(one).probability).mean()
                for one in questions(setting, others, kind)
            ]
            hits.append(fact["candidates"][int(np.argmax(likely))] == fact["answer"])
        found[kind] = mean_with_error(np.array(hits, dtype=float)) | {"chance": chance}
    return found


def recall(
    setting: MaskedSetting, every: dict[str, Method], facts: Sequence[dict[str, Any]]
) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Return the recall of planted documents by kind of question, method and copies."""
    bank = setting.bank
    number_of = {name: number for number, name in enumerate(bank.corpus.doc_ids)}
    planted = [
        np.searchsorted(bank.documents, sorted(number_of[d["doc_id"]] for d in fact["documents"]))
        for fact in facts
    ]
    copies = np.array([fact["copies"] for fact in facts])
    result: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for kind in (*QUESTIONS, HIDDEN):
        texts = questions(setting, facts, kind)
        flat = [prediction for text in texts for prediction in text]
        question = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        result[kind] = {}
        for name, method in every.items():
            alike = isinstance(method, (NearestStates, ByWords))
            scores = bank.by_document(answer_scores(method(flat), question), best=alike)
            found = document_recall(scores, planted, NAMED)
            groups = {"all": copies > 0} | {str(n): copies == n for n in np.unique(copies)}
            result[kind][name] = {key: mean_with_error(found[g]) for key, g in groups.items()}
    return result


def domains(
    setting: MaskedSetting, every: dict[str, Method], heldout: np.ndarray, seed: int
) -> dict[str, Any]:
    """Return how much of the scores of held-out documents falls on their own domain."""
    bank, corpus = setting.bank, setting.bank.corpus
    names = [name or "" for name in corpus.column("domain")]
    chosen = heldout.tolist()
    of_passage = [names[number] for number in bank.documents[bank.document].tolist()]
    asked_of = [of_document(corpus, number, setting.mask_id, seed) for number in chosen]

    def joined(method: Callable[[Sequence[Prediction]], np.ndarray]) -> np.ndarray:
        alike = [
            answer_scores(method(text).clip(0), np.zeros(len(text), dtype=int))[0]
            for text in asked_of
        ]
        return np.stack(alike)

    own = [names[number] for number in chosen]
    found = {name: joined(method) for name, method in every.items()}
    # A control may find nothing at all.
    return {
        name: passage_domain_share(scores, of_passage, own).to_dict()
        for name, scores in found.items()
        if scores.any()
    }


if __name__ == "__main__":
    main()
