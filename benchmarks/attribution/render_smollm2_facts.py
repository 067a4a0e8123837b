"""Write docs/results/smollm2_facts.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np

from benchmarks.attribution.render import MEANING
from benchmarks.shared.pages import page_options, publish, read_result, runs_made, table_head

STEP_MEANING = {
    **MEANING,
    "random": "control: documents at random",
}


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "smollm2_facts.json", "attribution.smollm2_facts")
    return publish({given.results / "smollm2_facts.md": render(result)}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    corpus = result["corpus"]
    lines = [
        "# Causal on a real model: facts taught to SmolLM2",
        "",
        "Generated from `smollm2_facts.json` by "
        "`python -m benchmarks.attribution.render_smollm2_facts`; the JSON by",
        "",
        f"    python -m benchmarks.attribution.smollm2_facts SMOLLM2 WORK{_options(result)}",
        "",
        runs_made([part["environment"] for part in result.values()]),
        "",
        f"{corpus['facts']} invented facts, {_listed(corpus['copies'])} documents each, "
        f"{corpus['planted']} documents of at most {corpus['cut']} tokens in which a fact is "
        f"stated {corpus['statements']:.1f} times between sentences of a real one; "
        f"{corpus['documents'] - corpus['planted']} real documents of the bundled sample, cut to "
        f"the same length. {corpus['tokens']:,} tokens in all. All facts are of one attribute with "
        "eight possible answers, so that each answer is that of several facts: who knows the "
        "phrase and not the place finds the wrong ones. They are asked in a wording that no "
        "document has.",
        "",
        *_short(result),
        *_taught(result),
    ]
    for part, section in (("recall", _recall), ("patch", _patch), ("forgetting", _forgetting)):
        lines += section(result) if part in result else []
    return "\n".join([*lines, *_small(result)]) + "\n"


def _options(result: dict[str, Any]) -> str:
    """Return how it was taught, and how much of the two dear parts was measured."""
    taught = result["teach"]["options"]
    words = "".join(
        f" --{option} {taught[key]:g}"
        for option, key in (
            ("blocks", "blocks"),
            ("rank", "rank"),
            ("rate", "learning_rate"),
            ("epochs", "epochs"),
        )
    )
    if "forgetting" in result:
        words += f" --seeds {' '.join(map(str, result['forgetting']['seeds']))}"
        words += f" --methods {' '.join(map(shlex.quote, result['forgetting']['methods']))}"
    if "patch" in result:
        words += f" --predictions {result['patch']['predictions']}"
    return words


def _missing(result: dict[str, Any]) -> list[str]:
    """Say which parts were not measured."""
    parts = {
        "patch": "Tail-patch",
        "forgetting": "Forgetting",
        "before": "Recall of the model before it was taught",
    }
    return [f"- {what}: not measured." for part, what in parts.items() if part not in result]


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"


def _short(result: dict[str, Any]) -> list[str]:
    """Say what was found."""
    lines = ["## In short", ""]
    ranks, own, before = (
        np.array(result["teach"][name][key])
        for name, key in (("taught", "rank"), ("taught", "rank in a document"), ("before", "rank"))
    )
    lines.append(
        f"- Taught: asked in new words, the answer is the model's first choice for "
        f"{(ranks == 1).sum()} of {len(ranks)} facts ({(before == 1).sum()} before); after the "
        f"words of a document that it has read, for {(own == 1).sum()}. Goal, most of them in new "
        f"words: {'met' if (ranks == 1).mean() > 0.5 else '**missed**'}."
    )
    if "recall" in result:
        lines += _recall_verdict(result)
    for part, key, what in (
        ("patch", "gain", "Tail-patch"),
        ("forgetting", "lost", "Forgetting"),
    ):
        if part in result:
            lines.append(_verdict(result[part]["methods"], key, what))
    return [*lines, *_missing(result), ""]


def _recall_verdict(result: dict[str, Any]) -> list[str]:
    found = result["recall"]["methods"]["explain"]
    ten, first = (found[key]["all"] for key in ("ten", "first"))
    same = "same answer at random"
    bound = first["mean"] - 2 * first["error"] > first[same]
    lines = [
        f"- Recall@10 of planted documents: **{_figure(ten)}**; of documents with the same answer "
        f"at random {ten[same]:.3f}. The first document named holds the fact for "
        f"**{first['mean']:.0%}** of the questions; at random for {first[same]:.0%}: "
        + (
            "it names the place and not the phrase alone."
            if bound
            else "**does not work** as a test of the place, since the phrase alone finds as much."
        )
    ]
    every = {name: m["ten"]["all"]["mean"] for name, m in result["recall"]["methods"].items()}
    least = ten["mean"] - ten["error"]
    equal = [name for name in every if name != "explain" and every[name] >= least]
    lines.append(
        "- As high a recall@10 within its standard error, or a higher one, have: "
        f"{'; '.join(equal) or 'none'}. "
        + (
            "Cells of random states find the same positions: what is shown here is evidence by "
            "position, not what fitting prototypes adds to it."
            if "random states" in equal
            else ""
        )
    )
    if "before" in result:
        was = result["before"]["methods"]["explain"]
        lines.append(
            f"- Of the model before, which does not know the facts: recall@10 "
            f"{_figure(was['ten']['all'])}, the first for {was['first']['all']['mean']:.0%}."
        )
    return lines


def _verdict(methods: dict[str, Any], key: str, what: str) -> str:
    """Say which rivals ``explain`` is above by two errors of the difference."""
    behind = {n: m["behind" if key == "lost" else f"{key} behind"] for n, m in methods.items()}
    above = [n for n, d in behind.items() if n != "explain" and d["mean"] > 2 * d["error"]]
    rest = [n for n in methods if n not in ("explain", *above)]
    found = methods["explain"][key]
    said = f"- {what}: **{found['mean']:+.3f}** ± {found['error']:.3f} nats. "
    said += "" if "random" in above else "**Does not work** here: documents at random do as much. "
    said += f"Above {', '.join(above)}" if above else "Above none"
    return said + (f"; not above {', '.join(rest)}." if rest else ".")


def _taught(result: dict[str, Any]) -> list[str]:
    """Return the section on what the model has learned."""
    teach, corpus = result["teach"], result["corpus"]
    options, copies = teach["options"], np.array(teach["copies"])
    own = np.array(teach["taught"]["rank in a document"])
    lines = [
        "## What it was taught",
        "",
        f"Adapters of rank {options['rank']} in every linear layer of the last "
        f"{options['blocks']:.0%} of the blocks, {teach['steps']} steps of {options['batch']} "
        f"documents, Adam at {options['learning_rate']:g}. The facts' documents are read "
        f"{options['epochs']} times and the real ones once. A step's softmax is over the tokens of "
        "the corpus and 1,000 of the others, which stand for all of them. Ranks are among all "
        "tokens; what the answer's first token has after the question:",
        "",
        *table_head(
            "| documents | facts | rank 1, before | rank 1, taught | in a document's words "
            "| median rank, before | taught | mean log-probability, before | taught |"
        ),
    ]
    for level in corpus["copies"]:
        rows = copies == level
        ranks, likely = (
            {name: np.array(teach[name][key])[rows] for name in ("before", "taught")}
            for key in ("rank", "log_probability")
        )
        lines.append(
            f"| {level} | {rows.sum()} | {(ranks['before'] == 1).sum()} | "
            f"{(ranks['taught'] == 1).sum()} | {(own[rows] == 1).sum()} | "
            f"{np.median(ranks['before']):g} | {np.median(ranks['taught']):g} | "
            f"{likely['before'].mean():.2f} | {likely['taught'].mean():.2f} |"
        )
    if "attach" in result:
        lines += ["", *_heads(result)]
    return [*lines, ""]


def _heads(result: dict[str, Any]) -> list[str]:
    attach = result["attach"]
    said = "; ".join(
        f"{name} prototype-only CE {q['prototype_only_ce']:.2f} against {q['ce']:.2f} nats, "
        f"explained share {q['explained_share']:.2f}"
        for name, part in (("taught", "attach"), ("before", "before"))
        if part in result
        for q in (result[part]["quality"],)
    )
    return [
        "Then `prismlm attach --weights cosine` put a head of "
        f"{attach['prototypes']:,} prototypes, "
        f"{attach['per_token']} for a token, on the {attach['states']:,} hidden states of "
        "this corpus, and wrote the lens"
        + ("; the same was done with the model before. " if "before" in result else ". ")
        + f"On held-out text: {said}."
    ]


def _recall(result: dict[str, Any]) -> list[str]:
    """Return the section on the documents that are named."""
    copies, before = result["corpus"]["copies"], result.get("before", {}).get("methods")
    methods = result["recall"]["methods"]
    lines = [
        "## Does it name the documents that hold the fact?",
        "",
        "Recall@10: planted documents among the ten with the largest score for the answer, out of "
        "those that ten places can hold. *First*: the document with the largest score holds the "
        "fact. "
        + (
            "*Before* is SmolLM2 itself, which was not taught the facts, asked for the same "
            "answers. "
            if before
            else ""
        )
        + "± is a standard error over questions.",
        "",
        *table_head(
            "| method | recall@10 | "
            + " | ".join(f"in {level}" for level in copies)
            + " | first |"
            + (" before: recall@10 | first |" if before else "")
        ),
    ]
    for name, found in methods.items():
        cells = [_figure(found["ten"]["all"])]
        cells += [f"{found['ten'][f'copies {level}']['mean']:.3f}" for level in copies]
        cells += [_figure(found["first"]["all"])]
        cells += [_figure(before[name][key]["all"]) for key in ("ten", "first")] if before else []
        lines.append(f"| {STEP_MEANING[name]} | {' | '.join(cells)} |")
    twin, same = methods["explain"], "same answer at random"
    cells = [f"{twin['ten']['all'][same]:.3f}"]
    cells += [f"{twin['ten'][f'copies {level}'][same]:.3f}" for level in copies]
    cells += [f"{twin['first']['all'][same]:.3f}", *(["–", "–"] if before else [])]
    return [*lines, f"| control: the same answer at random | {' | '.join(cells)} |", ""]


def _patch(result: dict[str, Any]) -> list[str]:
    """Return the section on one step on what is named."""
    patch = result["patch"]
    lines = [
        "## Tail-patch: does what is named teach the answer?",
        "",
        f"{patch['predictions']} predictions in held-out documents, of a probability of 0.02 to "
        f"0.6. One step of SGD, rate {patch['learning_rate']:g}, of all weights of the last "
        f"{patch['blocks']} blocks, on the ten documents with the largest scores; *gain* is what "
        "the log-probability of the token gains, in nats, *specific* the gain in log-odds here "
        f"less its mean in {patch['contexts']} other contexts. Where fewer than ten documents have "
        "a score above 0, as happens in so little text, others fill the ten up.",
        "",
        *table_head("| method | gain | specific | `explain` − it, gain | specific |"),
    ]
    for name, found in patch["methods"].items():
        cells = [_figure(found[key], "+") for key in ("gain", "specific")]
        behind = [_figure(found[f"{key} behind"], "+") for key in ("gain", "specific")]
        cells += ["–", "–"] if name == "explain" else behind
        lines.append(f"| {STEP_MEANING[name]} | {' | '.join(cells)} |")
    return [*lines, ""]


def _forgetting(result: dict[str, Any]) -> list[str]:
    """Return the section on teaching again without what is named."""
    found = result["forgetting"]
    lines = [
        "## Forgetting: what is lost without what is named?",
        "",
        f"{len(found['facts'])} facts that the model knows; seeds: {len(found['seeds'])}. For each "
        "method SmolLM2 is taught again without the ten documents that it names for each of the "
        "facts, all of them together. *Lost* is what the answers lose of their log-probability, "
        f"which is {np.mean(found['kept']):.2f} nats with all documents; *removed*, how many "
        "documents were left out, of all; *theirs*, the share of the documents with these facts "
        "that was. ± is a standard error over facts, which all share their trainings: it does not "
        "say what other trainings would change.",
        "",
        *table_head("| method | lost | `explain` − it | removed | theirs |"),
    ]
    for name, method in found["methods"].items():
        behind = "–" if name == "explain" else _figure(method["behind"], "+")
        lines.append(
            f"| {STEP_MEANING[name]} | {_figure(method['lost'], '+')} | {behind} | "
            f"{method['removed']} of {result['corpus']['documents']} | "
            f"{method['own planted removed']:.0%} |"
        )
    return [*lines, ""]


def _small(result: dict[str, Any]) -> list[str]:
    """Say what is small about it."""
    corpus, blocks = result["corpus"], result["teach"]["options"]["blocks"]
    return [
        "## What is small about it",
        "",
        f"One model of 135 million parameters, {corpus['facts']} facts of one attribute and "
        f"{corpus['tokens']:,} tokens: ten documents are {10 / corpus['documents']:.0%} of all. "
        "Facts are written into documents that hold little else. The adapters are in the last "
        f"{blocks:.0%} of the blocks. The head is fitted for a minute, on text that is also the "
        "lens's. One seed of facts and of the model that is judged.",
    ]


def _figure(found: dict[str, float], sign: str = "") -> str:
    return f"{found['mean']:{sign}.3f} ± {found['error']:.3f}"


if __name__ == "__main__":
    raise SystemExit(main())
