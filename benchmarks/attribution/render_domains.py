"""Write docs/results/domains.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.attribution.judges.domain_share import DomainShare, paired_difference
from benchmarks.attribution.judges.passage_domains import passage_domain_share
from benchmarks.shared.pages import (
    escaped,
    measured_on,
    page_options,
    publish,
    read_result,
    table_head,
)
from prismlm.statistics import bootstrap

METHODS = {
    "explain": "**`explain`**: shares by domain, as it gives them",
    "alone": "the same, with each prediction as if no text stood before it",
    "tokens": "control: the domains that have the text's tokens, wherever they stand",
    "BM25": "BM25: the ten best documents, by their scores",
}
OWN_SHARE, ACCURACY = 0.48, 0.87
LEVELS = (0.0, 0.5, 0.7, 0.9, 1.0)


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "domains.json", "attribution.domains")
    return publish({given.results / "domains.md": render(result)}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    own, names = result["own"], result["domains"]
    found = {
        name: passage_domain_share(np.array(result["shares"][name]), names, own) for name in METHODS
    }
    said = found["explain"]
    lines = [
        "# Domains: where the demo's model points for text it never read",
        "",
        "Generated from `domains.json` by `python -m benchmarks.attribution.render_domains`; the "
        "JSON by",
        "",
        "    python -m benchmarks.attribution.domains MODEL",
        "",
        measured_on(result["environment"]),
        "",
        f"A model of {result['model']['parameters']:,} parameters with a lens of "
        f"{result['corpus']['documents']:,} documents, {result['corpus']['tokens']:,} tokens. "
        f"{len(own)} other documents of the bundled sample, as many of each of {len(names)} "
        f"domains, are explained from their first {result['tokens']} tokens. *Own share*: of the "
        "document's domain, among what is attributed. *Accuracy*: its lift over the mean of all "
        "documents is the largest. The text before counts by the domains that the corpus names for "
        "its documents, the same that are asked for; of the text's own nothing is known. How "
        "long it counts was chosen with trials on these texts in view, too.",
        "",
        f"- Own share **{_interval(said.own_shares)}**, chance {said.chance:.3f}, goal "
        f"{OWN_SHARE}: {_verdict(said.own_share >= OWN_SHARE)}. Accuracy "
        f"**{_interval(said.hits)}**, chance {said.chance_accuracy:.3f}, goal {ACCURACY}: "
        f"{_verdict(said.accuracy >= ACCURACY)}.",
        *[_beside(said, found[name], name) for name in METHODS if name != "explain"],
        f"- Unattributed: {np.mean(result['unattributed']):.0%} of the evidence on average. The "
        "shares above are of the rest.",
        "",
        *table_head("| method | own share | accuracy |"),
        *[
            f"| {METHODS[name]} | {_interval(one.own_shares)} | {_interval(one.hits)} |"
            for name, one in found.items()
        ],
        "",
        "Brackets are 95 % of a bootstrap over documents.",
        "",
        *_trust(result),
        *_turned(result),
        "## By domain",
        "",
        *table_head("| domain | documents | own share | found | most often taken for |"),
        *_by_domain(result, said),
    ]
    return "\n".join(lines) + "\n"


def _interval(values: dict[int, float] | dict[int, bool]) -> str:
    found = bootstrap(np.array([float(value) for value in values.values()]))
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


def _beside(said: DomainShare, other: DomainShare, name: str) -> str:
    share = paired_difference(said.own_shares, other.own_shares)
    hits = paired_difference(said.hits, other.hits)
    return (
        f"- `explain` less {METHODS[name].removeprefix('control: ')}: own share {_signed(share)}, "
        f"accuracy {_signed(hits)}."
    )


def _signed(found: dict[str, float]) -> str:
    if found["low"] > 0:
        verdict = "above"
    else:
        verdict = "**below**" if found["high"] < 0 else "**not shown to differ**"
    low, high = found["low"], found["high"]
    return f"{found['difference']:+.3f} ({low:+.3f} to {high:+.3f}), {verdict}"


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def _trust(result: dict[str, Any]) -> list[str]:
    """Return how often the domain with the largest share is the text's own, by that share."""
    own = np.array([result["domains"].index(name) for name in result["own"]])
    lines = [
        "## How far a large share may be trusted",
        "",
        "By the largest share of any domain, among what is attributed: how often it is the text's "
        "own. Of an honest share that is at least the share.",
        "",
        *table_head("| largest share | texts | mean share | it is the text's own |"),
    ]
    shares = np.array(result["shares"]["explain"])
    shares /= shares.sum(1, keepdims=True)
    largest, right = shares.max(1), shares.argmax(1) == own
    for low, high in pairwise(LEVELS):
        rows = (largest > low) & (largest <= high)
        if rows.any():
            figures = f"{largest[rows].mean():.0%} | {right[rows].mean():.0%}"
            lines.append(f"| {low:.0%} to {high:.0%} | {rows.sum()} | {figures} |")
    return [*lines, ""]


def _turned(result: dict[str, Any]) -> list[str]:
    turned, names = result["turned"], result["domains"]
    own = turned["own"]
    found = {
        name: passage_domain_share(np.array(rows), names, own)
        for name, rows in turned["shares"].items()
    }
    share = paired_difference(found["explain"].own_shares, found["alone"].own_shares)
    return [
        "## Where a text turns to another matter",
        "",
        "What stood before may mislead then. Each text is read behind another, of another domain, "
        "as one text; the shares are of the second alone. With the text before, less without it: "
        f"own share {_signed(share)}.",
        "",
        *table_head("| method | own share | accuracy |"),
        *[
            f"| {METHODS[name]} | {_interval(one.own_shares)} | {_interval(one.hits)} |"
            for name, one in found.items()
        ],
        "",
    ]


def _by_domain(result: dict[str, Any], said: DomainShare) -> list[str]:
    own, names = np.array(result["own"]), result["domains"]
    shares = np.array(result["shares"]["explain"])
    shares = shares / shares.sum(1, keepdims=True)
    chosen = (shares / shares.mean(0)).argmax(1)
    lines: list[str] = []
    for place, name in enumerate(names):
        rows = np.flatnonzero(own == name).tolist()
        wrong = [names[at] for at in chosen[rows].tolist() if at != place]
        taken = max(sorted(set(wrong)), key=wrong.count) if wrong else "–"
        hits = sum(said.hits[row] for row in rows)
        share = np.mean([said.own_shares[row] for row in rows])
        lines.append(f"| {escaped(name)} | {len(rows)} | {share:.3f} | {hits} | {escaped(taken)} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
