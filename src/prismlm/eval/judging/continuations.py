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

from prismlm import fingerprints
from prismlm.corpus.encode import encode_text
from prismlm.corpus.store import Corpus
from prismlm.errors import InputError, check_whole
from prismlm.files import read_text
from prismlm.lens.labels.answers import Answers, Question
from prismlm.lens.opened_model import LARGEST_SEED, write_after
from prismlm.models.checkpoint import read_checkpoint
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import bootstrap

WORD = re.compile(r"\S+")
# Words of a reference for each token of a continuation: about as long, in English.
WORDS_PER_TOKEN = 0.75
FEWEST = 2


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
    wanted = how.words + how.following
    words = zip(range(wanted), WORD.finditer(text), strict=False)
    ends = [found.end() for _, found in words]
    if len(ends) < wanted:
        return Prompt(id, text[: ends[: how.words][-1] if ends else 0].strip(), "")
    middle, end = ends[how.words - 1], ends[-1]
    return Prompt(id, text[:middle].strip(), text[middle:end].strip())


def corpus_prompts(corpus: Corpus, count: int, how: Writing) -> list[Prompt]:
    """Return the beginnings of held-out documents, drawn by the seed; too short ones are none."""
    drawn = np.random.default_rng(how.seed).permutation(corpus.split("heldout"))
    ids = corpus.doc_ids
    cuts = (cut(ids[number], corpus.text(number), how) for number in drawn.tolist())
    return _enough((one for one in cuts if one.reference), count, f"{corpus.path}, held out,", how)


def file_prompts(path: Path, count: int, how: Writing) -> list[Prompt]:
    """Return the beginnings of a file's first lines; one that is short has no reference."""
    if not path.is_file():
        raise InputError(f"there is no file {path}: expected a text with a prompt on each line.")
    lines = enumerate(read_text(path).splitlines(), 1)
    cuts = (cut(str(number), line, how) for number, line in lines)
    return _enough((one for one in cuts if one.text), count, str(path), how)


def _enough(cuts: Iterable[Prompt], count: int, where: str, how: Writing) -> list[Prompt]:
    numbers = range(check_whole("the number of prompts", count, FEWEST))
    found = [one for _, one in zip(numbers, cuts, strict=False)]
    if len(found) < FEWEST:
        raise InputError(
            f"{where} has {len(found)} texts to continue: expected {FEWEST} or more, of "
            f"{how.words} words and {how.following} that follow. Give other text or shorter "
            "prompts with --prompt-words."
        )
    return found


class Writer:
    """A model that continues prompts, whose continuations are kept.

    Attributes:
        name: for the reader.
    """

    def __init__(self, name: str, directory: Path, how: Writing, kept: Path) -> None:
        self.name, self.how = name, how
        self._model, self._tokenizer = read_checkpoint(directory)
        settings = self._model.generation_config
        if settings.eos_token_id is None:
            settings.eos_token_id = self._tokenizer.eos_token_id
        identity = fingerprints.of_json([fingerprints.of_model(self._model), asdict(how)])
        self._answers = Answers(kept, identity)

    def texts(self, prompts: Sequence[Prompt], progress: Reporter = SILENT) -> list[str]:
        """Return the continuation of each prompt; those that are made are kept one by one."""
        texts: list[str] = []
        with progress.task(f"{self.name} writes", len(prompts), "prompts") as task:
            for number, prompt in enumerate(prompts):
                question = Question(({"role": "user", "content": prompt.text},), {"text": str})
                found = self._answers.get(question)
                if found is None:
                    found = {"text": self.write(prompt, number)}
                    self._answers.add(question, found)
                texts.append(found["text"])
                task.advance()
        return texts

    def write(self, prompt: Prompt, number: int = 0) -> str:
        """Return what the model writes after a prompt, whose number goes into the seed."""
        ids = torch.tensor([encode_text(self._tokenizer, prompt.text)])
        longest = getattr(self._model.config, "max_position_embeddings", None)
        if not ids.shape[1] or (longest and ids.shape[1] + self.how.tokens > longest):
            raise InputError(
                f"prompt {prompt.id!r} has {ids.shape[1]} tokens and {self.how.tokens} are to "
                f"follow: {self.name} reads 1 to {longest}. Give fewer --prompt-words."
            )
        seed = (self.how.seed + number) % LARGEST_SEED
        args = (self._model, self._tokenizer, ids.to(self._model.device))
        written = write_after(*args, self.how.tokens, self.how.temperature, seed)
        added = written[0, ids.shape[1] :].tolist()
        return str(self._tokenizer.decode(added, skip_special_tokens=True)).strip()


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
    samples: list[dict[str, Any]] = []
    for name, found in own.items():
        # A model's best prompt with what all models write after it, the best first.
        row = rows[int(np.argmax(found))]
        reference = prompts[row].reference
        given: list[dict[str, Any]] = [
            {"model": other, "text": text[row], "bleu": sentence_bleu(text[row], reference)}
            for other, text in texts.items()
        ]
        given.sort(key=lambda one: -one["bleu"])
        samples.append({"best": name, **asdict(prompts[row]), "texts": given})
    return {"prompts": len(rows), "models": models, "samples": samples}
