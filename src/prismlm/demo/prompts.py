"""What every demo has: its prompts, its directory, and the page at its end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import prismlm
from prismlm import fingerprints
from prismlm.corpus.chat import as_chat
from prismlm.cost import Cost
from prismlm.errors import InputError
from prismlm.files import WAY_OUT, atomic_file, keep_json, read_json, room_to_write
from prismlm.lens.labels.write import label_lens
from prismlm.models.sidecar import HEAD_FILE, META_FILE, has_sidecar
from prismlm.outputs import write_text
from prismlm.pages.trace import page
from prismlm.progress import Reporter

STATE_FILE = "demo.json"
REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.json"
DOMAINS_SHOWN = 3
# Seconds, memory and disk of each part, which is always the same work.
Parts = dict[str, tuple[float, int, int]]
REPORT_COST = (15.0, 0, 3_000_000)
TEMPERATURE = 0.5

# What a model goes on with, in so many tokens.
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

# For models that answer, in more. By topic: six that a pair of the demo's texts answers, two that a
# plain text does, two that nothing in the corpus is about.
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
class Answer:
    """The answer to a prompt, in what a summary shows of it; as JSON has it.

    Attributes:
        domain: of the prompt.
        prompt, words: what was asked, and what the model wrote.
        shares: the domains with the largest shares in what carries the words.
        unattributed: the share that no text stands behind.
        support: how well the corpus supports the words at all.
        passage: where the passage with the largest share is from, and its text before, at and after
            the marked token; None where no passage carries anything.
    """

    domain: str
    prompt: str
    words: str
    shares: list[list[Any]]
    unattributed: float
    support: str | None
    passage: list[str] | None


def _answer(domain: str, prompt: str, trace: prismlm.Trace) -> Answer:
    shares, steps = trace.sources("domain"), trace.steps[trace.first :]
    end = trace.lm and trace.lm.tokenizer.eos_token
    leading = [one for one in trace.passages(limit=1) if one.around is not None]
    return Answer(
        domain,
        prompt,
        "".join(step.pieces[1].shown for step in steps).removesuffix(str(end)),
        [[one.key, one.share] for one in shares.items[:DOMAINS_SHOWN]],
        shares.unattributed,
        None if trace.support is None else trace.support.level,
        [leading[0].source or leading[0].doc_id, *(leading[0].around or ())] if leading else None,
    )


@dataclass(frozen=True)
class DemoResult:
    """Where everything is.

    Attributes:
        model: the model directory.
        corpus: the corpus directory.
        report: the page with every explanation.
        answers: what the model answers to each domain's prompt, and what that relies on.
        cached: whether all of it was there already.
        chat: whether the prompts are questions.
    """

    model: Path
    corpus: Path
    report: Path
    answers: list[Answer]
    cached: bool
    chat: bool = False


def check_claim(out: Path, identity: dict[str, Any]) -> None:
    """Check that a demo may be built in a directory.

    Raises:
        InputError: it holds something else, or a demo of another size or version.
    """
    state = out / STATE_FILE
    if not state.is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out} exists and no demo made it. Choose another --out.")
    elif read_json(state) != identity:
        raise InputError(
            f"{out} holds a demo of another size or version of prismlm. "
            "Choose another --out, or remove it."
        )


def claim(out: Path, identity: dict[str, Any]) -> None:
    """Note whose directory this is, once :func:`check_claim` lets it pass."""
    check_claim(out, identity)
    if not (out / STATE_FILE).is_file():
        keep_json(out / STATE_FILE, identity)


def parts_there(out: Path) -> dict[str, bool]:
    """Say of corpus, model and lens whether each is there; what is there is whole."""
    model = out / "model"
    return {
        "corpus": (out / "corpus" / "corpus.json").is_file(),
        "model": has_sidecar(model),
        "lens": (model / "lens" / "sample").exists(),
    }


def estimate(out: Path, identity: dict[str, Any], parts: Parts, basis: str) -> Cost:
    """Say what a demo would still do, from what its parts took on two CPU cores.

    Each part says by its figure ``there`` whether it is there and whole.

    Raises:
        InputError: ``out`` holds something else, or another demo.
    """
    check_claim(out, identity)
    there = parts_there(out)
    # Of a part that is made anew, the report is as well.
    there["report"] = all(there.values()) and (out / REPORT_FILE).is_file()
    costs = [
        Cost(*((0.0, 0, 0) if there[name] else amounts), {"there": there[name]}, name=name)
        for name, amounts in (parts | {"report": REPORT_COST}).items()
    ]
    return Cost(
        sum(part.seconds or 0.0 for part in costs),
        max(part.memory_bytes for part in costs),
        sum(part.disk_bytes or 0 for part in costs),
        {"out": str(out)},
        tuple(costs),
        basis=f"As seen on two CPU cores{basis}.",
    )


def documents(path: Path, every: int) -> Path:
    """Return the bundled sample, or write one in ``every`` of its documents to ``path``."""
    from prismlm.corpus import sample_path

    if every == 1:
        return sample_path()
    table = pq.read_table(sample_path())
    with room_to_write(str(path), path.parent, WAY_OUT), atomic_file(path) as temporary:
        pq.write_table(table.take(list(range(0, len(table), every))), temporary)
    return path


def explain_prompts(
    out: Path, *, chat: bool = False, cached: bool, progress: Reporter
) -> DemoResult:
    """Explain what the model writes after the prompt of each domain, and write the page.

    With ``chat`` they are questions, put by the model's chat template. What was explained before,
    with the same files by the same code, is not explained again.
    """
    prompts, generated = (QUESTIONS, ANSWERED) if chat else (PROMPTS, GENERATED)
    model, corpus, report = out / "model", out / "corpus", out / REPORT_FILE
    summary = out / SUMMARY_FILE
    if summary.is_file() and report.is_file():
        before = read_json(summary)
        # What other code wrote may have other fields.
        same = before.get("of") == _state(model)
        answers = [Answer(**one) for one in before["answers"]] if same else []
        if [one.domain for one in answers] == list(prompts):
            return DemoResult(model, corpus, report, answers, cached, chat)
    lm = prismlm.load(model)
    assert lm.lens is not None
    if lm.lens.meta.labels is None:
        label_lens(lm.lens, lm.model, progress=progress)
    how: dict[str, Any] = {"generate": generated, "temperature": 0.0 if chat else TEMPERATURE}
    traces: list[prismlm.Trace] = []
    with progress.task("Explaining", len(prompts), "prompts") as task:
        for seed, prompt in enumerate(prompts.values()):
            traces.append(lm.explain(as_chat(prompt) if chat else prompt, **how, seed=seed))
            task.advance()
    write_text(report, page(traces, title="prismlm demo"))
    answers = [_answer(*one, trace) for one, trace in zip(prompts.items(), traces, strict=True)]
    keep_json(summary, {"of": _state(model), "answers": [asdict(one) for one in answers]})
    return DemoResult(model, corpus, report, answers, cached, chat)


def _state(model: Path) -> list[Any]:
    """Return what changes when a file of the model or of its lens does, or how it is explained."""
    found = [model / name for name in ("model.safetensors", HEAD_FILE, META_FILE)]
    found += (model / "lens" / "sample").iterdir()
    files = [[one.name, one.stat().st_size, one.stat().st_mtime_ns] for one in sorted(found)]
    code = sorted(Path(prismlm.__file__).parent.rglob("*.py"))
    return [*files, fingerprints.of_bytes(*(one.read_bytes() for one in code))]
