"""BLEU of continuations against what the text goes on with, by ``sacrebleu`` (ProtoT, B.3).

The control is the BLEU against what another prompt goes on with: words that any text has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from prismlm.eval.judging.continuations import Prompt
from prismlm.statistics import bootstrap


def sentence_bleu(text: str, reference: str, *, smooth: bool = True) -> float:
    """Return BLEU, 0 to 100; unsmoothed it is 0 where no four words match, as in the source.

    Raises:
        ModuleNotFoundError: sacrebleu is not installed, of the extra ``eval``.
    """
    import sacrebleu

    method = "exp" if smooth else "none"
    return sacrebleu.sentence_bleu(text, [reference], smooth_method=method).score


def bleu_figures(
    prompts: Sequence[Prompt], texts: Mapping[str, Sequence[str]], seed: int = 0
) -> dict[str, Any] | None:
    """Return mean BLEU of each model with the control's, and every model's best prompt.

    Args:
        prompts: those without a reference count for nothing.
        texts: continuations of the prompts, by model.
        seed: of the bootstrap over prompts.

    Returns:
        None where fewer than two prompts have a reference.
    """
    import sacrebleu

    rows = [number for number, one in enumerate(prompts) if one.reference]
    if len(rows) < 2 or not texts:
        return None
    references = [prompts[row].reference for row in rows]
    models, own = dict[str, Any](), dict[str, list[float]]()
    for name, written in texts.items():
        mine = [written[row] for row in rows]
        own[name] = list(map(sentence_bleu, mine, references))
        other = list(map(sentence_bleu, mine, [*references[1:], references[0]]))
        both = np.array([own[name], other]).T
        models[name] = {
            "mean": asdict(bootstrap(both[:, 0], seed=seed)),
            "other_prompt": asdict(bootstrap(both[:, 1], seed=seed)),
            "difference": asdict(bootstrap(both, coefficients=(1, -1), seed=seed)),
            "corpus": sacrebleu.corpus_bleu(mine, [references]).score,
        }
    best = {name: rows[int(np.argmax(found))] for name, found in own.items()}
    return {
        "prompts": len(rows),
        "models": models,
        "samples": [_sample(name, prompts[row], row, texts) for name, row in best.items()],
    }


def _sample(
    best: str, prompt: Prompt, row: int, texts: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return a model's best prompt with what all models write after it, the best first."""
    written = [
        {
            "model": name,
            "text": found[row],
            "bleu": sentence_bleu(found[row], prompt.reference),
            "unsmoothed": sentence_bleu(found[row], prompt.reference, smooth=False),
        }
        for name, found in texts.items()
    ]
    return {"best": best, **asdict(prompt), "texts": sorted(written, key=lambda one: -one["bleu"])}
