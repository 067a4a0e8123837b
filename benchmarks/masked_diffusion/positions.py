"""States that predict masked tokens, each with its token, as evidence needs them.

The shift of left-to-right models is kept: the state before a masked token has that token as "the
next one". States, head, cells and methods of attribution are the same ones; a position's place is
that of the masked token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.attribution.judges.passages import PassageBank, Prediction
from benchmarks.attribution.methods.setting import ROWS_AT_ONCE, Asked, Positions, Setting
from benchmarks.masked_diffusion.facts import Question
from benchmarks.masked_diffusion.model import MaskedDiffusionLM, after_an_end, masked_states
from benchmarks.masked_diffusion.train import WINDOW, maskable
from prismlm import fingerprints
from prismlm.corpus import Corpus, document_windows, window_batches
from prismlm.explain.prediction import SplitPredictions, record, split_predictions
from prismlm.index.cells import Cells
from prismlm.index.positions import position_records
from prismlm.index.sort_cells import Spool, write_cells, write_documents
from prismlm.index.states import META_FILE, HiddenStates, Writer
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, capture
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.progress import SILENT

TOKENS_PER_BATCH = 4096
# Every token is masked once in so many readings of its text, each with other tokens masked.
READINGS = 3
# Of a held-out document, so many tokens are asked for.
TOKENS_ASKED = 32


class Masked(NamedTuple):
    """Positions of one pass: states, [N, d]; the tokens there, and global places, int64 [N]."""

    z: Tensor
    token: Tensor
    place: Tensor


@torch.no_grad()
def masked_passes(
    model: MaskedDiffusionLM,
    corpus: Corpus,
    documents: np.ndarray,
    seed: int,
    readings: int = READINGS,
) -> Iterator[Masked]:
    """Read documents ``readings`` times; every token but their ends is masked in one of them."""
    generator = torch.Generator().manual_seed(seed)
    grid = document_windows(documents, corpus.starts, corpus.lengths, WINDOW, WINDOW)
    for batch in window_batches(grid, corpus, TOKENS_PER_BATCH, corpus.eos_token_id):
        ids, chosen = batch.input_ids, maskable(batch, corpus)
        reading = torch.randint(readings, ids.shape, generator=generator)
        for number in range(readings):
            masked = chosen & (reading == number)
            z = masked_states(model, ids, masked, batch.attention_mask)
            yield Masked(z, ids[masked], batch.positions[masked])


def keep_states(
    directory: Path, model: MaskedDiffusionLM, corpus: Corpus, seed: int
) -> tuple[HiddenStates, np.ndarray]:
    """Return the states of the training text in its order, and their places, int64 [N].

    They are kept on disk, as those of any model are that a head is fitted to.
    """
    run = {"model": fingerprints.of_model(model), "corpus": corpus.fingerprint, "seed": seed}
    places = directory / "places.npy"
    if not (directory / META_FILE).is_file():
        passes = list(masked_passes(model, corpus, corpus.split("train"), seed))
        z, token, place = (torch.cat(column) for column in zip(*passes, strict=True))
        order = place.argsort()
        with Writer(directory, run, int(model.config.hidden_size)) as writer:
            writer.add(z[order].bfloat16(), token[order])
            writer.end_block()
            np.save(places, place[order].numpy())
    return HiddenStates.open(directory), np.load(places)


@torch.no_grad()
def positions_of(
    head: PrototypeHead, states: HiddenStates, places: np.ndarray, bank: PassageBank
) -> Positions:
    """Return the kept positions as methods of attribution read them.

    What the model gave each token is left open (NaN): only forms of evidence that are not asked
    here weigh by it.
    """
    found: list[list[np.ndarray]] = []
    for rows in np.array_split(np.arange(len(states)), -(-len(states) // ROWS_AT_ONCE)):
        z = states.states(rows)
        cell = head.nearest(z).indices[:, 0].int()
        unit = (z * inverse_norms(z)).half()
        found.append([column.numpy() for column in (cell, z.norm(dim=-1), unit)])
    token, unknown = states.tokens().int().numpy(), np.full(len(states), np.nan, dtype=np.float32)
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    passage, read = bank.passage_at(places).astype(np.int32), np.zeros_like(token)
    return Positions(passage, token, read, unknown, unknown, *columns)


@torch.no_grad()
def cells_of(
    directory: Path,
    model: MaskedDiffusionLM,
    nearest: np.ndarray,
    states: HiddenStates,
    places: np.ndarray,
    corpus: Corpus,
) -> Cells:
    """Write the positions as an index writes its own, by nearest prototype and token; open them."""
    directory.mkdir(parents=True, exist_ok=True)
    spool = Spool(directory / "spool", states.width)
    for rows in np.array_split(np.arange(len(states)), -(-len(states) // ROWS_AT_ONCE)):
        z, token = states.states(rows), states.tokens(rows)
        cell, place = torch.from_numpy(nearest[rows]), torch.from_numpy(places[rows])
        # The last token read is not one thing here; all have the same, so that it changes nothing.
        tokens = torch.zeros_like(token), token
        spool.add(position_records(1.0, model, z, cell, tokens, place))
        spool.flush()
    write_documents(directory, corpus, "train")
    cells, vocabulary = int(nearest.max()) + 1, int(model.config.vocab_size)
    meta = write_cells(directory, [spool], cells, vocabulary, 1.0, SILENT)
    spool.path.unlink()
    return Cells(directory, meta)


@dataclass(frozen=True, eq=False)
class MaskedPrediction(Prediction):
    """The prediction of a masked token.

    Attributes:
        ids: the whole text with its masks, int64 [T]; the same array for all masks of one text.
        place: which of them is predicted.
    """

    place: int = 0


def of_question(question: Question, mask_id: int, *, hidden: bool = False) -> list[Prediction]:
    """Return the predictions of an answer, all of it masked; ``hidden`` masks the rest as well."""
    first, last = question.answer.start, question.answer.stop
    read = question.ids.copy()
    read[slice(None) if hidden else question.answer] = mask_id
    return [MaskedPrediction(read, int(question.ids[n]), place=n) for n in range(first, last)]


def of_document(corpus: Corpus, number: int, mask_id: int, seed: int) -> list[Prediction]:
    """Return the first tokens of a document as predictions, every one masked once."""
    length = min(TOKENS_ASKED, int(corpus.lengths[number]) - 1)
    ids = corpus.tokens(int(corpus.starts[number]), length).astype(np.int64)
    reading = np.random.default_rng([seed, number]).integers(READINGS, size=length)
    found: list[Prediction] = []
    for one in range(READINGS):
        read = np.where(reading == one, mask_id, ids)
        places = np.flatnonzero(reading == one).tolist()
        found += [MaskedPrediction(read, int(ids[n]), number, place=n) for n in places]
    return found


@dataclass(frozen=True, eq=False)
class MaskedSetting(Setting):
    """A setting that is asked for masked tokens."""

    @property
    def mask_id(self) -> int:
        """The id of the mask: the last of the vocabulary."""
        return int(self.model.config.vocab_size) - 1

    def ask(self, predictions: Sequence[Prediction]) -> Asked:
        """Read predictions; those of one text after another are read in one pass."""
        texts = [list(group) for _, group in groupby(predictions, key=lambda p: id(p.ids))]
        found = [self._columns(text) for text in texts]
        return Asked(*(np.concatenate(column) for column in zip(*found, strict=True)))

    @torch.no_grad()
    def split(self, text: Sequence[Prediction]) -> SplitPredictions:
        """Split the predictions of every token of a text, of which the masked ones count.

        The model reads the text with its masks; the tokens that stood there are what is predicted.
        """
        read = torch.from_numpy(text[0].ids)
        whole = read.clone()
        for prediction in text:
            assert isinstance(prediction, MaskedPrediction)
            whole[prediction.place] = prediction.target
        model = self.model
        with record(model) as recorded:
            model(input_ids=after_an_end(model, read[None]), use_cache=False)
        ids = after_an_end(model, whole[None])
        # The states are of the masks, which stand for these tokens.
        recorded = recorded._replace(read=[ids])
        return split_predictions(model, self.head, self.logit_map, ids, ids.shape[1], recorded)

    def _columns(self, text: Sequence[Prediction]) -> tuple[np.ndarray, ...]:
        with capture(self.model) as seen:
            split = self.split(text)
        evidence = split.evidence()
        places = [p.place for p in text if isinstance(p, MaskedPrediction)]
        columns = (
            evidence.states,
            seen.z[0].norm(dim=-1),
            split.targets,
            torch.zeros_like(split.targets),
            split.log_probabilities.exp(),
            evidence.indices,
            evidence.evidence,
        )
        return tuple(column[places].detach().numpy() for column in columns)


def setting_of(
    model: MaskedDiffusionLM, head: PrototypeHead, bank: PassageBank, positions: Positions
) -> MaskedSetting:
    """Return what methods of attribution are made of, for a masked-diffusion model."""
    logit_map = LogitMap.of(model)
    return MaskedSetting(model, bank.corpus.tokenizer, head, logit_map, bank, positions, WINDOW)
