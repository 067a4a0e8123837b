"""A question and its answer on a terminal: word by word while the model writes, or at once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

from prismlm.cli.output import fit_ends, plain
from prismlm.corpus.chat import text_of
from prismlm.pages.trace_data import visible

if TYPE_CHECKING:
    from prismlm.corpus.chat import Messages
    from prismlm.explain.steps import Step
    from prismlm.explain.trace import Trace

# Lines that a prompt takes at most; of a longer one, both ends are shown.
PROMPT_LINES = 3
# Columns of what is written before its word ends: some scripts have no spaces.
LONGEST_WORD = 24


class Writer:
    """Writes words as they come and breaks lines between them.

    Args:
        console: that is written to.
    """

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

    def flush(self, style: str = "") -> None:
        """Write what waits for the rest of its word."""
        self._put(self._waiting, style)
        self._waiting = ""

    def end(self) -> None:
        """Write the last word, and end its line."""
        self._waiting = self._waiting.rstrip()
        self.flush()
        if self._column:
            self._out("\n")

    def _put(self, word: str, style: str) -> None:
        body, width = word.rstrip(), self._console.width
        if self._column and self._column + cell_len(body) > width:
            self._out("\n")
        for part in chop_cells(body, width):
            self._out(part, style)
        blank = word[len(body) :]
        lines = blank.count("\n")
        self._out("\n" * lines or blank[: max(0, width - self._column)])

    def _out(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), end="", soft_wrap=True)
        self._column = 0 if text.endswith("\n") else self._column + cell_len(text)


class AnswerPrinter:
    """Prints what a model was asked, dim, and below it what the model wrote.

    Args:
        console: that is written to.
        text: what is explained: a text, or the messages of a chat.
    """

    def __init__(self, console: Console, text: str | Messages) -> None:
        self._console, self._writer, self._text = console, Writer(console), text
        self._begun = False

    @property
    def question(self) -> str:
        """The text, or the last message of the user."""
        if isinstance(self._text, str):
            return self._text
        said = [text_of(one.get("content")) for one in self._text if one["role"] == "user"]
        return said[-1] if said else ""

    def follow(self, step: Step, special: bool) -> None:
        """Print the target of one step, if the model wrote it and it is no mark of a chat."""
        if step.target_from == "generated" and not special:
            shown = step.pieces[1].shown
            if shown := shown if self._begun else shown.lstrip():
                self._begin()
                self._writer.write(shown)

    def pause(self) -> None:
        """End the line of what was written so far."""
        if self._begun:
            self._writer.end()

    def finish(self, trace: Trace) -> None:
        """Print what was not printed yet, and what must be said of the answer."""
        whole = self._text if isinstance(self._text, str) else trace.answer
        if not trace.written and not trace.first:
            self._writer.write(whole)
        elif not self._begun:
            self._begin()
            self._writer.write(trace.answer.strip())
        self._writer.flush()
        if not trace.written and isinstance(self._text, str):
            following = visible(plain(trace.steps[-1].pieces[1].label))
            self._writer.write(f" → {following}", "dim italic")
            self._writer.flush("dim italic")
        self._writer.end()
        if trace.written and not trace.answer.strip():
            self._console.print("The model wrote nothing: it ended the text at once.", style="bold")
        elif (trace.written or trace.first) and repeats(self.question, trace.answer):
            self._console.print(
                "The answer repeats the question, so what follows is about the question's words.",
                style="yellow",
            )
        self._console.print()

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        shown = fit_ends(self.question, PROMPT_LINES * self._console.width)
        self._writer.write(shown, "dim")
        self._writer.flush("dim")
        self._writer.end()
        self._console.print()


def repeats(question: str, answer: str) -> bool:
    """Say whether an answer is little more than the question, or its beginning, once again."""
    asked, said = (re.findall(r"\w+", text.casefold()) for text in (question, answer))
    same = min(len(asked), len(said))
    return same > 3 and asked[:same] == said[:same] and len(said) <= 2 * len(asked)
