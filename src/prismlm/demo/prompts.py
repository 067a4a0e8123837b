"""What every demo has: its prompts, its directory, and the page at its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prismlm
from prismlm import fingerprints
from prismlm.corpus.chat import as_chat
from prismlm.errors import InputError
from prismlm.files import read_json
from prismlm.lens.labels.write import label_lens
from prismlm.outputs import write_text
from prismlm.pages.trace import page
from prismlm.progress import Reporter

STATE_FILE = "demo.json"
REPORT_FILE = "report.html"
TEMPERATURE = 0.5

# Tokens that the model generates.
GENERATED = 12
PROMPTS = {
    "biology": "The expression of these genes in cells",
    "children": "Once upon a time there was a little",
    "computer science": "We propose a neural network that",
    "fiction": "He looked at her for a moment, and then said",
    "finance": "The Federal Reserve expects that inflation",
    "government": "Federal agencies can use this website to",
    "history": "After the war, the American colonists",
    "law": "The applicant submitted that the decision of the Tribunal",
    "mathematics": "We prove that the number of solutions of the equation",
    "medicine": "The symptoms of this disease in patients include",
    "physics": "We measure the magnetic field and the energy of the electron",
    "software": "This function returns a pointer to the",
}

# Six that a pair of the demo's texts answers, two that a plain text does, and two that nothing in
# the corpus is about.
ANSWERED = 64
QUESTIONS = {
    "varicose veins": "Why do people get varicose veins?",
    "sleep apnea": "What happens during the night when somebody has sleep apnea?",
    "cystic fibrosis": "Which faulty gene do people with cystic fibrosis have?",
    "Whipple disease": "Which germ makes people ill with Whipple disease?",
    "sudden cardiac arrest": "What is the first sign of sudden cardiac arrest?",
    "angina": "How does the pain of angina feel?",
    "Royal Proclamation": "What was the Royal Proclamation of 1763?",
    "Pinocchio": "Why did Geppetto sell his coat?",
    "bicycle tyre": "How do I change a bicycle tyre?",
    "wine": "Which wine goes well with grilled salmon?",
}
ABSENT = ("bicycle tyre", "wine")


@dataclass(frozen=True)
class DemoResult:
    """The directories of a demo, and its explanations."""

    model: Path
    corpus: Path
    report: Path  # the page with every explanation
    answers: dict[str, prismlm.Trace]  # by prompt
    cached: bool  # whether all of it was there already
    chat: bool = False  # whether the prompts are questions


def note_of(size: str, *inputs: bytes) -> dict[str, Any]:
    """Return what STATE_FILE in a demo's directory says."""
    made_of = fingerprints.of_bytes(*inputs)
    return {"prismlm": prismlm.__version__, "size": size, "inputs": made_of}


def holds(out: Path, note: dict[str, Any]) -> bool:
    """Return whether a directory is this demo's; InputError if it is of another, or no demo's."""
    if not (out / STATE_FILE).is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out} exists and no demo made it. Choose another --out.")
        return False
    if read_json(out / STATE_FILE) != note:
        raise InputError(
            f"{out} holds a demo of another size or version of prismlm. "
            "Choose another --out, or remove it."
        )
    return True


def explain_prompts(
    out: Path, *, chat: bool = False, cached: bool, progress: Reporter
) -> DemoResult:
    """Explain what the model writes after each prompt (``chat``: question), and write the page."""
    prompts, generated = (QUESTIONS, ANSWERED) if chat else (PROMPTS, GENERATED)
    model, corpus, report = out / "model", out / "corpus", out / REPORT_FILE
    lm = prismlm.load(model)
    assert lm.lens is not None
    if lm.lens.meta.labels is None:
        label_lens(lm.lens, lm.model, progress=progress)
    how: dict[str, Any] = {"generate": generated, "temperature": 0.0 if chat else TEMPERATURE}
    answers: dict[str, prismlm.Trace] = {}
    with progress.task("Explaining", len(prompts), "prompts") as task:
        for seed, prompt in enumerate(prompts.values()):
            source = as_chat(prompt) if chat else prompt
            answers[prompt] = lm.explain(source, **how, seed=seed)
            task.advance()
    write_text(report, page([*answers.values()], title="prismlm demo"))
    return DemoResult(model, corpus, report, answers, cached, chat)
