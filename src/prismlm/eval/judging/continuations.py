"""What models write after the same prompts, and its BLEU against the text's own continuation.

A prompt is a text cut at the end of a word, which each model's own tokenizer splits. Models write
one prompt after the other, so that what stands in a batch changes nothing. BLEU is by ``sacrebleu``
(ProtoT, B.3); its control is the BLEU against what another prompt's text goes on with.
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
# Words of a reference for each token of a continuation: about as long, in English.
WORDS_PER_TOKEN = 0.75
MIN_PROMPTS = 2


@dataclass(frozen=True)
class Writing:
    """How texts are cut and continued.

    Attributes:
        words: of a prompt.
        tokens: that each model writes after it, at most.
        temperature: 0 takes the top token; else tokens are drawn.
        seed: of the texts and tokens that are drawn.
    """

    words: int = 64
    tokens: int = 50
    temperature: float = 0.0
    seed: int = 0

    @property
    def following(self) -> int:
        """How many words of what follows the prompt are the reference."""
        return max(1, round(WORDS_PER_TOKEN * self.tokens))


@dataclass(frozen=True)
class Prompt:
    """A text that is continued: its first words, and those that follow, empty if too few.

    Its ``id`` is the document's, or the number of the line.
    """

    id: str
    text: str
    reference: str


def cut(id: str, text: str, how: Writing) -> Prompt:
    """Return a text cut after the last word of the prompt and of the reference."""
    count = how.words + how.following
    ends = [word.end() for _, word in zip(range(count), WORD.finditer(text), strict=False)]
    if not ends:
        return Prompt(id, "", "")
    middle = ends[min(how.words, len(ends)) - 1]
    reference = text[middle : ends[-1]].strip() if len(ends) == count else ""
    return Prompt(id, text[:middle].strip(), reference)


def corpus_prompts(corpus: Corpus, count: int, how: Writing) -> list[Prompt]:
    """Return the beginnings of held-out documents, drawn by the seed; too short ones are none."""
    drawn = np.random.default_rng(how.seed).permutation(corpus.split("heldout"))
    ids = corpus.doc_ids
    cuts = (cut(ids[number], corpus.text(number), how) for number in drawn.tolist())
    return _first((one for one in cuts if one.reference), count, f"{corpus.path}, held out,", how)


def file_prompts(path: Path, count: int, how: Writing) -> list[Prompt]:
    """Return the beginnings of a file's first lines; one that is short has no reference."""
    if not path.is_file():
        raise InputError(f"there is no file {path}: expected a text with a prompt on each line.")
    lines = enumerate(read_text(path).splitlines(), 1)
    cuts = (cut(str(number), line, how) for number, line in lines)
    return _first((one for one in cuts if one.text), count, str(path), how)


def _first(cuts: Iterable[Prompt], count: int, where: str, how: Writing) -> list[Prompt]:
    check_whole("the number of prompts", count, MIN_PROMPTS)
    prompts = [one for _, one in zip(range(count), cuts, strict=False)]
    if len(prompts) < MIN_PROMPTS:
        raise InputError(
            f"{where} has {len(prompts)} texts to continue: expected {MIN_PROMPTS} or more, of "
            f"{how.words} words and {how.following} that follow. Give other text or shorter "
            "prompts with --prompt-words."
        )
    return prompts


def continue_prompts(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    how: Writing,
    progress: Reporter = SILENT,
) -> list[str]:
    """Return what a model writes after each prompt, whose number goes into the seed."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if model.generation_config.eos_token_id is None:  # pyright: ignore
        model.generation_config.eos_token_id = tokenizer.eos_token_id  # pyright: ignore
    texts: list[str] = []
    with progress.task(f"{name} writes", len(prompts), "prompts") as task:
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([encode_text(tokenizer, prompt.text)], device=model.device)
            length = ids.shape[1]
            if not length or (longest and length + how.tokens > longest):
                raise InputError(
                    f"prompt {prompt.id!r} has {length} tokens and {how.tokens} are to follow: "
                    f"{name} reads 1 to {longest}. Give fewer --prompt-words."
                )
            seed = (how.seed + number) % MAX_SEED
            written = write_after(model, tokenizer, ids, how.tokens, how.temperature, seed)
            added = written[0, length:].tolist()
            texts.append(str(tokenizer.decode(added, skip_special_tokens=True)).strip())
            task.advance()
    return texts


def sentence_bleu(text: str, reference: str) -> float:
    """Return smoothed BLEU, 0 to 100."""
    import sacrebleu

    return sacrebleu.sentence_bleu(text, [reference]).score


def bleu_figures(
    prompts: Sequence[Prompt], texts: Mapping[str, Sequence[str]], seed: int = 0
) -> dict[str, Any] | None:
    """Return mean BLEU of each model's texts with the control's, and every model's best prompt.

    None where fewer than two prompts have a reference; those without count for nothing.
    """
    import sacrebleu

    rows = [number for number, one in enumerate(prompts) if one.reference]
    if len(rows) < 2 or not texts:
        return None
    references = [prompts[row].reference for row in rows]
    models: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    for name, written in texts.items():
        own = [written[row] for row in rows]
        bleu = list(map(sentence_bleu, own, references))
        other = list(map(sentence_bleu, own, [*references[1:], references[0]]))
        both = np.array([bleu, other]).T
        models[name] = {
            "mean": asdict(bootstrap(both[:, 0], seed=seed)),
            "other_prompt": asdict(bootstrap(both[:, 1], seed=seed)),
            "difference": asdict(bootstrap(both, coefficients=(1, -1), seed=seed)),
            "corpus": sacrebleu.corpus_bleu(own, [references]).score,
        }
        # The model's best prompt, with what all models write after it.
        row = rows[int(np.argmax(bleu))]
        given = [
            {"model": model, "text": t[row], "bleu": sentence_bleu(t[row], prompts[row].reference)}
            for model, t in texts.items()
        ]
        given.sort(key=lambda one: -float(one["bleu"]))
        samples.append({"best": name, **asdict(prompts[row]), "texts": given})
    return {"prompts": len(rows), "models": models, "samples": samples}
