"""The fourteen broad categories of PRISM, and which of them a prototype's places are of."""

from __future__ import annotations

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from prismlm.lens.labels.vocabulary import WORDS, Vocabulary

BOILERPLATE, MORPHOLOGY, SCAFFOLD = "Boilerplate / Artifact", "Morphology", "Grammar / Scaffold"
NUMBERS, ENTITIES, LINKS = "Numbers / Time", "Named Entities", "URLs / IDs"
OTHER = "Misc / Other"
# Words that are of a subject. What is near them in the model's own output embedding is as well.
SUBJECTS: dict[str, str] = WORDS["subjects"]
CATEGORIES = (
    BOILERPLATE, MORPHOLOGY, SCAFFOLD, NUMBERS, ENTITIES, LINKS, OTHER, *SUBJECTS
)  # fmt: skip
# A word is of a subject where it is nearer to it than all but this part of the words.
NEAREST = 0.015
LEAST_WORDS = 3
# Directions that frequent words share, which say nothing of meaning (Mu and Viswanath 2018).
DIRECTIONS = 8


@torch.no_grad()
def subject_words(weight: Tensor, vocabulary: Vocabulary) -> sparse.csr_matrix:
    """Return which words are of which subject, 1 or 0, [words, subjects].

    A subject is the mean of the unit rows of W of its words, without the mean of all rows and
    their first principal directions; the words with the largest cosine to it are its own, each
    that of its nearest subject alone.
    """
    content = np.flatnonzero(vocabulary.content)
    shape = len(vocabulary.words), len(SUBJECTS)
    if len(content) <= LEAST_WORDS:
        return sparse.csr_matrix(shape, dtype=np.float32)
    rows = weight[torch.from_numpy(content)].float()
    rows -= rows.mean(0)
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    shared = vectors[:, -min(DIRECTIONS, rows.shape[1] - 1) :]
    rows = torch.nn.functional.normalize(rows - rows @ shared @ shared.T, dim=1)
    number = {vocabulary.words[w]: i for i, w in enumerate(vocabulary.word[content].tolist())}
    centres: list[Tensor] = []
    for words in SUBJECTS.values():
        known = [number[word] for word in words.split() if word in number]
        centre = rows[known].mean(0) if len(known) >= LEAST_WORDS else torch.zeros(rows.shape[1])
        centres.append(centre)
    near = rows @ torch.nn.functional.normalize(torch.stack(centres), dim=1).T
    least = near.quantile(1 - NEAREST, dim=0).clamp(min=1e-6)
    nearest = near.div(least).max(1)
    for column, words in enumerate(SUBJECTS.values()):
        own = [number[word] for word in words.split() if word in number]
        nearest.values[own], nearest.indices[own] = 1.0, column
    chosen = (nearest.values >= 1).numpy()
    found = (vocabulary.word[content][chosen], nearest.indices.numpy()[chosen])
    matrix = sparse.csr_matrix((np.ones(int(chosen.sum()), np.float32), found), shape=shape)
    matrix.data[:] = 1  # several tokens write one word
    return matrix
