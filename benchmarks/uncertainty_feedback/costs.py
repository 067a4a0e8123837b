"""The section on what uncertainty feedback costs, from what the script of its overhead timed."""

from __future__ import annotations

from benchmarks.shared.pages import measured_on, ranged, table_head
from benchmarks.uncertainty_feedback.arms import Row

GOAL = 0.01


def overhead(result: Row, where: str) -> list[str]:
    """Return the section of one timing, ``where`` it was made."""
    model, shape, counted = result["model"], result["shape"], result["counted"]
    lines = [
        f"## What it costs {where}",
        "",
        f"GPT-2 of width {model['width']} with {model['layers']} layers and random weights, "
        f"{model['parameters']:,} parameters; the table of {model['levels']:,} levels has "
        f"{model['table']:,} more, {model['table'] / model['parameters']:.0%}. Forms took turns in "
        "one run; a ratio is to the same model without feedback, the median over rounds with its "
        "95 % interval over resampled rounds, which of fewer than six reaches from the least to "
        f"the most. Decoding: {shape['tokens']} tokens after "
        f"{shape['prompt']}, each a round; prefill: {shape['batch']} × {shape['length']} tokens, "
        f"{shape['rounds']} rounds, as of training steps. *No feedback, again*: the control, the "
        "same model timed a second time. *What one pass adds, alone*: the vectors of the codes, "
        "their gradient, and clipping and AdamW of the table, timed in turn with the steps; what "
        "the hooks read of a call is not in it.",
        "",
        *table_head("| what | form | time | processor | without feedback, ms | peak MiB |"),
    ]
    names = _names(shape)
    for part, forms in result["timed"].items():
        for form, clocks in forms.items():
            both = (clocks["elapsed"], clocks["processor"])
            cells = " | ".join(ranged(clock, "ratio", ".4f") for clock in both)
            took = result["milliseconds"][part]["no feedback"]
            peak = result["peak_mib"][part]
            shown = "from the cache" if (part, form) == ("decode", "one pass") else form
            lines.append(
                f"| {names[part]} | {shown} | {cells} | {took:,.1f} | {peak[form]:,.0f} "
                f"({peak['no feedback']:,.0f}) |"
            )
    tokens = {"step": shape["batch"], "large step": shape["large_batch"]}
    tokens = {part: rows * shape["length"] for part, rows in tokens.items()}
    lines += ["", *judged(result["timed"], names, tokens)]
    table, own = (sum(result["memory"][name].values()) / 2**20 for name in ("table", "model"))
    return [
        *lines,
        "",
        f"The peak is of the first call, beyond what was held before it; in brackets without "
        f"feedback. Weights, gradients and AdamW's state of the table hold {table:,.0f} MiB beside "
        f"the model's {own:,.0f}, {table / own:.0%} more.",
        "",
        "Counted on paper, floating point operations beside the model's: decoding "
        f"{counted['decode']:.2%}; a training step of {counted['tokens_of_a_step']:,} tokens "
        f"{counted['one_pass']:.2%} with one pass and {counted['two_passes']:.0%} with two.",
        "",
        measured_on(result["environment"]),
        "",
    ]


def _names(shape: Row) -> dict[str, str]:
    """Return what the parts are called."""
    tokens = {name: shape[name] * shape["length"] for name in ("batch", "large_batch")}
    return {
        "decode": "decoding",
        "prefill": "prefill",
        "step": f"training step of {tokens['batch']:,} tokens",
        "large step": f"training step of {tokens['large_batch']:,} tokens"
        + ", again" * (tokens["batch"] == tokens["large_batch"]),
    }


def judged(timed: dict[str, Row], names: dict[str, str], tokens: dict[str, int]) -> list[str]:
    """Return whether decoding and one pass of training cost less than the goal, as measured."""
    lines: list[str] = []
    for part in ("decode", "step", "large step"):
        found = _less_one(timed[part]["one pass"]["processor"])
        settled = not found["low"] < GOAL <= found["high"]
        words = "Decoding" if part == "decode" else f"One pass in a {names[part]}"
        alone = timed[part].get("what one pass adds, alone")
        line = (
            f"- {words} takes {found['ratio']:+.1%} of processor time ({found['low']:+.1%} to "
            f"{found['high']:+.1%}); goal of under {GOAL:.0%}: "
        )
        if settled or alone is None:
            line += f"{_answer(found['ratio'])}{'' if settled else ', by the median alone'}."
        else:
            share = alone["processor"]
            # To two digits.
            long = float(f"{share['ratio'] / GOAL * tokens[part]:.2g}")
            line += (
                f"not settled so. What it adds takes {share['ratio']:.2%} ({share['low']:.2%} to "
                f"{share['high']:.2%}) of such a step, timed alone: {_answer(share['ratio'])}. It "
                f"would be {GOAL:.0%} of a step of {long:,.0f} tokens."
            )
        lines.append(line)
    return lines


def _less_one(ratio: Row) -> Row:
    return {name: value - 1 for name, value in ratio.items()}


def _answer(more: float) -> str:
    return f"**{'reached' if more < GOAL else 'missed'}**"
