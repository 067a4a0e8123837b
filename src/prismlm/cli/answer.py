"""A question and its answer on a terminal: word by word while the model writes, or at once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

from prismlm.cli.output import fit_ends, plain, token_text

if TYPE_CHECKING:
    from prismlm.explain.steps import Step
    from prismlm.explain.trace import Trace

# Lines that a prompt takes at most; of a longer one, both ends are shown.
PROMPT_LINES = 3
# Columns of what is written before its word ends: some scripts have no spaces.
LONGEST_WORD = 24


class Writer:
    """Writes words as they come and breaks lines between them."""

    def __init__(self, console: Console) -> None:
        self._console, self._column, self._waiting = console, 0, ""

    def write(self, text: str, style: str = "") -> None:
        """Write what is whole words by now."""
        self._waiting += plain(text).replace("\t", "    ")
        *words, self._waiting = re.split(r"(?<=\s)(?=\S)", self._waiting)
        if cell_len(self._waiting) > LONGEST_WORD:
            words, self._waiting = [*words, self._waiting], ""
        for word in words:
            self._put(word, style)

    def end(self, style: str = "") -> None:
        """Write the last word, and end its line."""
        self._put(self._waiting.rstrip(), style)
        self._waiting = ""
        if self._column:
            self._out("\n")

    def _put(self, word: str, style: str) -> None:
        body, width = word.rstrip(), self._console.width
        if self._column and self._column + cell_len(body) > width:
            self._out("\n")
        for part in chop_cells(body, width):
            self._out(part, style)
        blank = word[len(body) :]
        self._out("\n" * blank.count("\n") or blank[: max(0, width - self._column)])

    def _out(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), end="", soft_wrap=True)
        self._column = 0 if text.endswith("\n") else self._column + cell_len(text)


class AnswerPrinter:
    """Prints what a model was asked, dim, and below it what the model wrote.

    Args:
        console: that is written to.
        question: a text, or a chat's last message of the user.
    """

    def __init__(self, console: Console, question: str) -> None:
        self._console, self._writer, self._question = console, Writer(console), question
        self._begun = False

    def follow(self, step: Step) -> None:
        """Print the target of one step, if the model wrote it."""
        shown = step.pieces[1].shown if step.target_from == "generated" else ""
        if shown := shown if self._begun else shown.lstrip():
            self._begin()
            self._writer.write(shown)

    def pause(self) -> None:
        """End the line of what was written so far."""
        if self._begun:
            self._writer.end()

    def finish(self, trace: Trace, is_text: bool) -> None:
        """Print what was not printed yet, and what must be said of the answer."""
        answers = trace.written or trace.first
        if not answers:
            self._writer.write(self._question if is_text else trace.answer)
        elif not self._begun:
            self._begin()
            self._writer.write(trace.answer.strip())
        if not trace.written and is_text:
            self._writer.write(f" → {token_text(trace.steps[-1].pieces[1].label)}")
        self._writer.end()
        if trace.written and not trace.answer.strip():
            self._console.print("The model wrote nothing: it ended the text at once.", style="bold")
        elif answers and repeats(self._question, trace.answer):
            self._console.print(
                "The answer repeats the question, so what follows is about the question's words.",
                style="yellow",
            )
        self._console.print()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            shown = fit_ends(self._question, PROMPT_LINES * self._console.width)
            self._console.print(shown, style="dim", end="\n\n")


def repeats(question: str, answer: str) -> bool:
    """Say whether an answer is little more than the question, or its beginning, once again."""
    asked, said = (re.findall(r"\w+", text.casefold()) for text in (question, answer))
    same = min(len(asked), len(said))
    return same > 3 and asked[:same] == said[:same] and len(said) <= 2 * len(asked)
