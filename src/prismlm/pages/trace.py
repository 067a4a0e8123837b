"""A trace as HTML that needs nothing but a browser: no requests, no fonts, no libraries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from html import escape
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

from prismlm.corpus.words import DITTO
from prismlm.direction_marks import marks_shown
from prismlm.explain.steps import Step
from prismlm.files import json_text
from prismlm.lens.layout import trained_on_words
from prismlm.pages.colours import colour
from prismlm.pages.frame import asset, html_page, joined
from prismlm.pages.trace_data import (
    Pool,
    has_feedback,
    support_line,
    trace_data,
    visible,
)

if TYPE_CHECKING:
    from prismlm.explain.trace import Trace

CAVEAT = (
    "Shares show which learned patterns carry a prediction and where they occur in the corpus; "
    "they are no proof that removing a document changes the answer."
)
NO_LENS = "This model has no lens, so no training text is shown. `prismlm index` builds one."
EMPTY = "<i>The model wrote nothing.</i>"
TOKEN_BY_TOKEN = "Token by token: the prototypes behind each prediction"
SCRIPTS = ("parts.js", "trace.js")
FROM = {"generated": "written by the model", "argmax": "the model's top token"}


def page(
    traces: Sequence[Trace], title: str = "Where the answer comes from", *, against: int = 0
) -> str:
    """Return a complete HTML document with one article per trace.

    With ``against`` each has so many passages that speak against its predictions.

    Everything that comes from texts, corpora and labels is escaped; only http and https addresses
    become links, and a content policy forbids every request.
    """
    body = f"<h1>{escape(title)}</h1>\n{_articles(traces, against)}"
    return html_page(title, body, styles=("trace.css",), scripts=SCRIPTS)


def fragment(trace: Trace) -> str:
    """Return what a notebook shows for a trace; any number of them may stand on one page."""
    body = marks_shown(_articles([trace]))
    return f"<style>{asset('trace.css')}</style>\n{body}\n<script>{joined(SCRIPTS)}</script>"


def _articles(traces: Sequence[Trace], against: int = 0) -> str:
    """Return an article for each trace; after those of one lens comes what they share."""
    groups: list[str] = []
    numbers = count()
    for _, group in groupby(traces, key=lambda trace: (trace.model, id(trace.lens))):
        members = list(group)
        pool = Pool(members[0].lens)
        articles = [_article(trace, next(numbers), pool, against) for trace in members]
        shared = f'<script type="application/json">{json_for_script(pool.to_dict())}</script>'
        groups.append('<div class="p-traces">\n' + "\n".join([*articles, shared]) + "\n</div>")
    return "\n".join(groups)


def _article(trace: Trace, number: int, pool: Pool, against: int) -> str:
    if not trace.steps:
        return '<article class="prismlm"><p class="p-note">This trace has no steps.</p></article>'
    data = json_for_script(trace_data(trace, pool, against))
    scope = f"prismlm-{hashlib.sha256(data.encode()).hexdigest()[:12]}-{number}"
    return (
        f'<article class="prismlm" id="{scope}">\n{_answer(trace)}\n<div class="p-whole"></div>\n'
        f'<details class="p-tokens"><summary>{TOKEN_BY_TOKEN}</summary>\n'
        '<div class="p-text" role="listbox" aria-label="Tokens of the text; arrow keys move" '
        f'aria-orientation="horizontal" aria-controls="{scope}-panel">'
        f"{''.join(_tokens(trace))}</div>\n{_legend(trace)}\n"
        f'<div class="p-panel" id="{scope}-panel" aria-live="polite"></div>\n'
        "</details>\n<noscript><p class='p-note'>Documents, and the panel that splits one "
        "prediction, need JavaScript. Without it, tokens name their leading prototype when pointed "
        f"at.</p></noscript>\n{_about(trace)}\n"
        f'<script type="application/json">{data}</script>\n</article>'
    )


def json_for_script(value: dict[str, Any]) -> str:
    """Return JSON, escaped so that no text in it can end a script element or start a comment."""
    text = json_text(value, separators=(",", ":"), default=str)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _answer(trace: Trace) -> str:
    """Return the answer and a sentence on its support, which comes first where there is none."""
    support = support_line(trace) or {"level": "unknown", "sentence": NO_LENS}
    said = f'<p class="p-support p-{support["level"]}">{escape(support["sentence"])}</p>'
    asked = trace.question if trace.first or trace.written else ""
    parts = [
        f'<p class="p-question">{escape(asked)}</p>' * bool(asked),
        f'<p class="p-answer">{escape(trace.answer.strip()) or EMPTY}</p>',
    ]
    parts.insert(0 if support["level"] == "none" else 2, said)
    parts += [f'<p class="p-note">{escape(note)}</p>' for note in trace.notes]
    return f'<header class="p-top-of">{"".join(parts)}</header>'


def _about(trace: Trace) -> str:
    facts = [("Model", trace.model)]
    if trace.lens is not None:
        meta = trace.lens.meta
        corpus = f"{meta.tokens:,} tokens of {meta.documents:,} documents"
        facts += [("Lens", trace.lens.name), ("Corpus", corpus)]
        if meta.trained_on is not None:
            facts.append(("Trained on it", trained_on_words(meta.trained_on, meta.split)))
    items = "".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    return f'<footer class="p-caveat"><p>{escape(CAVEAT)}</p><dl>{items}</dl></footer>'


def _tokens(trace: Trace) -> Iterator[str]:
    generated, feedback = False, has_feedback(trace)
    for number, step in enumerate(trace.steps):
        yield _token(step, number, generated, feedback)
        generated = step.target_from == "generated"
    last = trace.steps[-1]
    if last.target_from != "text":
        label = f"{FROM[last.target_from]}: {visible(last.pieces[1].label)}"
        yield (
            f'<span class="p-next" title="{escape(label)}"><span class="p-sr">'
            f"{escape(FROM[last.target_from])}: </span>{_shown(last.pieces[1].label)}</span>"
        )


def _token(step: Step, number: int, generated: bool, feedback: bool) -> str:
    strength = min(max(step.explained_share, 0.0), 1.0)
    leading = max(step.prototypes, key=lambda use: use.evidence, default=None)
    name = "none in use" if leading is None else leading.name or f"prototype {leading.id}"
    read, target = step.pieces
    shown = _shown(read.text) if read.number == 1 else DITTO
    tint = colour(None if leading is None else leading.category)
    label = (
        f"{visible(read.label)}, then {visible(target.label)} at {step.probability:.1%}; "
        f"leading prototype: {name}; explained {step.explained_share:.0%}"
    )
    classes, style = "p-token", f"--k:{tint};--a:{strength:.2f}"
    if generated:
        classes += " p-written"
    if feedback:
        classes += " p-fed"
        style += f";--u:{step.uncertainty or 0:.3f}"
        fed = f"uncertainty {step.uncertainty or 0:.0%}, code {step.uncertainty_code or 0:,}"
        label += f"; fed back: {'nothing' if step.uncertainty is None else fed}"
    return (
        f'<span class="{classes}" role="option" '
        f'tabindex="{0 if number == 0 else -1}" aria-selected="false" data-step="{number}" '
        f'style="{style}" title="{escape(label)}" '
        f'aria-label="{escape(label)}">{shown}</span>'
    )


def _shown(token: str) -> str:
    return escape(token).replace("\n", '<i class="p-return">↵</i>\n') or "∅"


def _legend(trace: Trace) -> str:
    written = any(step.target_from == "generated" for step in trace.steps)
    return (
        '<ul class="p-legend">'
        '<li><span class="p-key p-key-hue" aria-hidden="true"></span>colour: the prototype that '
        "leads the next prediction</li>"
        '<li><span class="p-key p-key-share" aria-hidden="true"></span>line below: how much of it '
        "the prototypes explain</li>"
        + (
            '<li><span class="p-key p-key-fed" aria-hidden="true"></span>line above: uncertainty '
            "fed back to the token, of the prediction before it</li>"
        )
        * has_feedback(trace)
        + ('<li><span class="p-key-written">abc</span> written by the model</li>' * written)
        + "<li><kbd>←</kbd> <kbd>→</kbd> move, <kbd>Home</kbd> <kbd>End</kbd> jump</li></ul>"
    )
