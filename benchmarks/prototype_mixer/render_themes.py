"""Write docs/results/prototype_mixer_themes.md and .svg; ``--check`` only compares."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.labels.render_themes import FIGURES, drawn_units, histograms, means
from benchmarks.shared.bars import Bars, draw_bars
from benchmarks.shared.pages import page_options, publish, read_result, table_head
from prismlm.statistics import Interval, bootstrap

# What the source finds of ProtoT beside LLaMA (§5.1), and the sign that says so.
CLAIMS = {
    "disentanglement": ("higher disentanglement", 1),
    "coverage": ("higher coverage", 1),
    "themes": ("fewer themes", -1),
}
COLOURS = {"channels": "#2563eb", "heads": "#9ca3af"}
Row = dict[str, Any]


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "prototype_mixer_themes.json", "labels.themes")
    page = given.results / "prototype_mixer_themes.md"
    pages = {page: render(result["units"]), page.with_suffix(".svg"): plot(result["units"])}
    return publish(pages, check=given.check)


def plot(units: list[Row]) -> str:
    """Return the histograms of channels and heads side by side, with their random sequences."""
    names = {"themes": "number of themes"}
    compared = [
        Bars(
            f"{one['of']} of {one['called']}",
            COLOURS[one["of"]],
            *(
                {names.get(figure, figure): one["figures"][figure][kind] for figure in FIGURES}
                for kind in ("histogram", "random_histogram")
            ),
        )
        for one in units
    ]
    return draw_bars([names.get(figure, figure) for figure in FIGURES], compared, "at random")


def render(units: list[Row]) -> str:
    """Return the page."""
    lines = [
        "# Are a ProtoT's channels about fewer things than a LLaMA's heads?",
        "",
        "Generated from `prototype_mixer_themes.json` by `python -m "
        "benchmarks.prototype_mixer.render_themes`; the JSON by, with `--out` naming it,",
        "",
        "    python -m benchmarks.labels.themes units PROTOT --of channels --corpus DIR "
        "--called ProtoT",
        "    python -m benchmarks.labels.themes units LLAMA --of heads --corpus DIR --called LLaMA",
        "",
        "After ProtoT, §5.1, Figures 2 and 24: the ten sequences of held-out text that activate a "
        "unit most, a channel by its write gate, a head by attention and the norms of its values, "
        "are judged: how well their main theme is disentangled, how many hold it, how many themes "
        "there are, 1 to 10 each. The source asks GPT-5.1; here words alone judge "
        "([how](../lens.md#themes), [how well](themes.md)), so that sizes are not to be compared "
        "with its figures, only which model is ahead. The source has no random sequences; here "
        "they stand in brackets. [The models](prototype_mixer_four_models.md).",
        "",
        *means(units),
        "",
        *_claims(units),
        *histograms(units),
        *drawn_units(units),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _claims(units: list[Row]) -> list[str]:
    lines = [
        "## Claims of the source",
        "",
        "Mean of ProtoT's channels less that of LLaMA's heads, and the same of how far each lies "
        "from its own random sequences; 95 % of a bootstrap over units. Shown: both intervals lie "
        "on the claim's side of 0; the opposite: both on the other.",
        "",
        *table_head("| ProtoT has | difference | beyond random sequences | |"),
    ]
    found = {one["of"]: one["figures"] for one in units}
    for figure in FIGURES:
        said, sign = CLAIMS[figure]
        pair = [found[of][figure] for of in ("channels", "heads")]
        plain, beyond = (difference(pair, random=random) for random in (False, True))
        sides = {_side(one, sign) for one in (plain, beyond)}
        verdict = sides.pop() if len(sides) == 1 else "not shown"
        lines.append(f"| {said} | {_ranged(plain)} | {_ranged(beyond)} | **{verdict}** |")
    return [
        *lines,
        "",
        "## How many units have each value",
        "",
        "![shares of units by value](prototype_mixer_themes.svg)",
        "",
    ]


def _side(one: Interval, sign: int) -> str:
    if one.low <= 0 <= one.high:
        return "not shown"
    return "shown" if one.value * sign > 0 else "the opposite"


def _ranged(one: Interval) -> str:
    return f"{one.value:+.2f} ({one.low:+.2f} to {one.high:+.2f})"


def difference(pair: list[Row], *, random: bool) -> Interval:
    """Return the first's mean less the second's; each less its random sequences', or not.

    Values are read from histograms, of which the first count is that of the value 1.
    """
    kinds = ("histogram", "random_histogram")[: 2 if random else 1]
    groups = [np.repeat(np.arange(1, 11), one[kind]) for one in pair for kind in kinds]
    signs = (1, -1, -1, 1) if random else (1, -1)
    of_group = np.repeat(np.arange(len(groups)), [len(one) for one in groups])
    member = (of_group[:, None] == np.arange(len(groups))).astype(float)
    return bootstrap(np.concatenate(groups)[:, None] * member, member, signs)


if __name__ == "__main__":
    raise SystemExit(main())
