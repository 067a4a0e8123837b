"""Continuations of the same prompts by several models, and their BLEU.

A prompt is a text cut at the end of a word; each model's own tokenizer encodes it. Prompts are
continued one at a time, so that the result does not depend on a batch. BLEU is by ``sacrebleu``
(ProtoT, B.3); its control is the BLEU against the reference of another prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.corpus.encode import encode_text
from prismlm.corpus.store import Corpus
from prismlm.errors import InputError, check_whole
from prismlm.files import read_text
from prismlm.lens.opened_model import MAX_SEED, write_after
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import bootstrap

WORD = re.compile(r"\S+")
# Words of a reference per token of a continuation: about the same length in English.
WORDS_PER_TOKEN = 0.75
MIN_PROMPTS = 2


@dataclass(frozen=True)
class Writing:
    """How texts are cut and continued.

    Attributes:
        words: per prompt.
        tokens: maximum per continuation.
        temperature: 0 takes the top token; otherwise tokens are sampled.
        seed: of sampled texts and tokens.
    """

    words: int = 64
    tokens: int = 50
    temperature: float = 0.0
    seed: int = 0

    @property
    def following(self) -> int:
        """The number of words of the reference."""
        return max(1, round(WORDS_PER_TOKEN * self.tokens))


@dataclass(frozen=True)
class Prompt:
    """The first words of a text, and its reference: the words that follow, empty if too few.

    Its ``id`` is the document's, or the number of the line.
    """

    id: str
    text: str
    reference: str


def cut(id: str, text: str, settings: Writing) -> Prompt:
    """Cut a text after the last word of the prompt and of the reference."""
    count = settings.words + settings.following
    ends = [word.end() for _, word in zip(range(count), WORD.finditer(text), strict=False)]
    if not ends:
        return Prompt(id, "", "")
    middle = ends[min(settings.words, len(ends)) - 1]
    reference = text[middle : ends[-1]].strip() if len(ends) == count else ""
    return Prompt(id, text[:middle].strip(), reference)


def corpus_prompts(corpus: Corpus, count: int, settings: Writing) -> list[Prompt]:
    """Return the beginnings of held-out documents, drawn by the seed, without too short ones."""
    numbers = np.random.default_rng(settings.seed).permutation(corpus.split("heldout")).tolist()
    ids = corpus.doc_ids
    prompts = (cut(ids[number], corpus.text(number), settings) for number in numbers)
    usable = (prompt for prompt in prompts if prompt.reference)
    return _first(usable, count, f"{corpus.path}, held out,", settings)


def file_prompts(path: Path, count: int, settings: Writing) -> list[Prompt]:
    """Return the beginnings of a file's first lines; a short line has no reference."""
    if not path.is_file():
        raise InputError(f"there is no file {path}: expected a text with a prompt on each line.")
    lines = enumerate(read_text(path).splitlines(), 1)
    prompts = (cut(str(number), line, settings) for number, line in lines)
    return _first((prompt for prompt in prompts if prompt.text), count, str(path), settings)


def _first(prompts: Iterable[Prompt], count: int, source: str, settings: Writing) -> list[Prompt]:
    check_whole("the number of prompts", count, MIN_PROMPTS)
    chosen = [prompt for _, prompt in zip(range(count), prompts, strict=False)]
    if len(chosen) < MIN_PROMPTS:
        raise InputError(
            f"{source} has {len(chosen)} texts to continue: expected {MIN_PROMPTS} or more, of "
            f"{settings.words} words and {settings.following} that follow. Give other text or "
            "shorter prompts with --prompt-words."
        )
    return chosen


def continue_prompts(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: Writing,
    progress: Reporter = SILENT,
) -> list[str]:
    """Return a model's continuation of each prompt; seeds differ by prompt."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if model.generation_config.eos_token_id is None:  # pyright: ignore
        model.generation_config.eos_token_id = tokenizer.eos_token_id  # pyright: ignore
    texts: list[str] = []
    with progress.task(f"{name} writes", len(prompts), "prompts") as task:
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([encode_text(tokenizer, prompt.text)], device=model.device)
            length = ids.shape[1]
            if not length or (limit and length + settings.tokens > limit):
                raise InputError(
                    f"prompt {prompt.id!r} has {length} tokens and {settings.tokens} are to "
                    f"follow: {name} reads 1 to {limit}. Give fewer --prompt-words."
                )
            seed = (settings.seed + number) % MAX_SEED
            output = write_after(model, tokenizer, ids, settings.tokens, settings.temperature, seed)
            new = output[0, length:].tolist()
            texts.append(str(tokenizer.decode(new, skip_special_tokens=True)).strip())
            task.advance()
    return texts


def sentence_bleu(text: str, reference: str) -> float:
    """Return smoothed BLEU, 0 to 100."""
    import sacrebleu

    return sacrebleu.sentence_bleu(text, [reference]).score


def bleu_figures(
    prompts: Sequence[Prompt], texts: Mapping[str, Sequence[str]], seed: int = 0
) -> dict[str, Any] | None:
    """Return mean BLEU of each model and of the control, and every model's best prompt.

    Prompts without a reference are left out; None if fewer than two remain.
    """
    import sacrebleu

    rows = [number for number, prompt in enumerate(prompts) if prompt.reference]
    if len(rows) < 2 or not texts:
        return None
    references = [prompts[row].reference for row in rows]
    models: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    for name, continuations in texts.items():
        answers = [continuations[row] for row in rows]
        bleu = list(map(sentence_bleu, answers, references))
        control = list(map(sentence_bleu, answers, [*references[1:], references[0]]))
        both = np.array([bleu, control]).T
        models[name] = {
            "mean": asdict(bootstrap(both[:, 0], seed=seed)),
            "other_prompt": asdict(bootstrap(both[:, 1], seed=seed)),
            "difference": asdict(bootstrap(both, coefficients=(1, -1), seed=seed)),
            "corpus": sacrebleu.corpus_bleu(answers, [references]).score,
        }
        # The model's best prompt, with the continuations of all models.
        row = rows[int(np.argmax(bleu))]
        ranked = [
            {"model": model, "text": t[row], "bleu": sentence_bleu(t[row], prompts[row].reference)}
            for model, t in texts.items()
        ]
        ranked.sort(key=lambda sample: -float(sample["bleu"]))
        samples.append({"best": name, **asdict(prompts[row]), "texts": ranked})
    return {"prompts": len(rows), "models": models, "samples": samples}
