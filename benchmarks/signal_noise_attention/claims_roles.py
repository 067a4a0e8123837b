"""The section on heads that look for a word's role (Prism, Fig. 3)."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def roles_of(models: dict[str, list[Row]]) -> list[str]:
    """Return how many heads were found for each role, beside random weights; nothing if unread."""
    read = {name: [r for r in rows if r.get("roles")] for name, rows in models.items()}
    read = {name: rows for name, rows in read.items() if rows}
    if not read:
        return []
    first = next(iter(read.values()))[0]["roles"]
    lines = [
        "## Do heads look for the subject, the object, determiners or verbs?",
        "",
        f"Heads whose lift and excess on the words of a role beat random other words of the same "
        f"sentences, at q ≤ {first['level']:g} over all heads and roles (Benjamini and Hochberg), "
        f"by {first['draws']:,} draws or more, on {first['sentences']} sentences: by seed, of all "
        "heads. *random weights*: the same search in the same model untrained. Lift is the share "
        "of attention over that of uniform attention, excess what of it is beyond the head's own "
        "habit at those distances; of the head with the least p, in the first seed.",
        "",
        "| model | role | found by seed | random weights by seed | heads | lift | random words | "
        "excess | q |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    beyond: list[str] = []
    for name, rows in read.items():
        for at, role in enumerate(rows[0]["roles"]["roles"]):
            same = [row["roles"]["roles"][at] for row in rows]
            found, random = ([one[key] for one in same] for key in ("found", "untrained"))
            best = role["best"]
            shown = ["–"] * 4
            if best is not None:
                shown = [f"{best[key]:.2f}" for key in ("lift", "control", "excess")]
                shown.append(f"{best['q']:.2g}")
            cells = [" ".join(map(str, counts)) for counts in (found, random)]
            lines.append(
                f"| {name} | {role['role']} | {' | '.join(cells)} | {rows[0]['roles']['heads']} | "
                f"{' | '.join(shown)} |"
            )
            if all(own > other for own, other in zip(found, random, strict=True)):
                beyond.append(f"{name}, {role['role']}")
    answer = "; ".join(beyond) if beyond else "none"
    return [
        *lines,
        "",
        f"- More heads than in random weights, in every seed that was read: {answer}. These are "
        "counts and not a test of their difference.",
        "",
    ]
