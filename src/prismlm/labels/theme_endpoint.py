"""Themes by a language model: ProtoT's rubric, asked of an endpoint, one question a unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from prismlm.files import json_text
from prismlm.labels.answers import Answers, Question, fenced, one_line, prompt
from prismlm.labels.embedded import NAME_LENGTH
from prismlm.labels.endpoint import Endpoint, Session
from prismlm.labels.themes import SEQUENCES, Judgement, Passage, check_units
from prismlm.progress import SILENT, Reporter

EXPLANATION_LENGTH = 400
FIGURES = ("disentanglement", "coverage", "themes")


class EndpointJudge:
    """Asks a language model; every answer is kept, and not asked for again.

    Args:
        endpoint: where it is.
        answers: the file that answers are kept in.
        announce: is told, before anything is asked, how many questions there are that are not
            answered yet, and of how many characters.

    Raises:
        ModuleNotFoundError: openai is not installed, of the extra ``label``.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        answers: Path,
        announce: Callable[[int, int], object] = lambda questions, characters: None,
    ) -> None:
        self.announce = announce
        self.session = Session(endpoint, Answers(answers, endpoint.model))
        self.source = f"endpoint:{one_line(endpoint.model, NAME_LENGTH)}"

    def judge(
        self, units: Sequence[Sequence[Passage]], progress: Reporter = SILENT
    ) -> list[Judgement | None]:
        """Return the figures of units, None where there was no good answer.

        Raises:
            InputError: a unit has not ten passages, the endpoint cannot be used, or more than half
                of its answers cannot.
        """
        check_units(units)
        questions = [theme_question(unit) for unit in units]
        new = [one for one in questions if self.session.answers.get(one) is None]
        self.announce(len(new), sum(len(m["content"]) for one in new for m in one.messages))

        def ask(number: int) -> Judgement:
            answer = self.session.ask(questions[number])
            return Judgement(
                theme=one_line(answer["theme"], NAME_LENGTH),
                explanation=one_line(answer["explanation"], EXPLANATION_LENGTH),
                **{name: answer[name] for name in FIGURES},
            )

        with progress.task("Asking for themes", len(units), "units") as task:
            found = dict(self.session.each(range(len(units)), ask, task))
        return [found.get(number) for number in range(len(units))]


def theme_question(unit: Sequence[Passage]) -> Question:
    """Return what is asked about one unit."""
    lines = [json_text({"passage": number, "text": _shown(p)}) for number, p in enumerate(unit, 1)]
    data = fenced("\n".join(lines))
    # No message of role "system": some models' templates refuse one.
    asked = f"{prompt('system')}\n\n{prompt('themes', data=data)}"
    return Question(
        ({"role": "user", "content": asked},),
        {"theme": str, **dict.fromkeys(FIGURES, int), "explanation": str},
        holds=lambda answer: (
            bool(one_line(answer["theme"], NAME_LENGTH))
            and all(1 <= answer[name] <= SEQUENCES for name in FIGURES)
        ),
    )


def _shown(passage: Passage) -> str:
    """Return a passage with its marks; what looks like one in it is changed."""
    plain = (word.replace("<<", "‹‹").replace(">>", "››") for word in passage.words)
    return "".join(f"<<{w}>>" if i in passage.marked else w for i, w in enumerate(plain))
