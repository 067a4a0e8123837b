"""The claims of the four sources, each with a verdict from the pages' own figures."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.pages import (
    channels,
    edits,
    mixer,
    prototype_head,
    prototype_mixer,
    prototype_mixer_glue,
    prototype_mixer_robustness,
    signal_noise_attention,
    uncertainty_feedback,
)
from benchmarks.pages.signal_noise_attention import DEFAULT
from benchmarks.shared.over_seeds import Difference

SHOWN, PART, NOT, OPPOSITE = "**shown**", "in part", "not shown", "the opposite"
Figures = dict[str, Any]


class Claim(NamedTuple):
    """A row of the table."""

    said: str
    verdict: str
    figure: str
    page: str


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the claims by source, and how many have which verdict."""
    sources = {
        "PRISM, prototype head": _prism(read),
        "ProtoT, prototype mixer": _protot(read),
        "PRISMA, uncertainty feedback": _prisma(read),
        "Prism, signal/noise attention": _signal_noise(read),
    }
    rows = [claim for claims in sources.values() for claim in claims]
    counts = {word: sum(c.verdict == word for c in rows) for word in (SHOWN, PART, NOT, OPPOSITE)}
    return {"sources": sources, "counts": counts, "total": len(rows)}


def verdict(apart: Difference, wanted: int) -> str:
    """Return the verdict of an interval that should exclude 0 on one side."""
    return {wanted: SHOWN, 0: NOT, -wanted: OPPOSITE}[apart.sign]


def counted(shown: int, of: int) -> str:
    """Return the verdict of a claim that is shown in some of many cases."""
    return SHOWN if shown == of else PART if shown else NOT


def _prism(read: Callable[..., Any]) -> list[Claim]:
    head, edit = prototype_head.figures(read), edits.figures(read)
    losses = {n: fmean(head["over_plain"](head["methods"][n], "ce")) for n in ("source", "light")}
    step, gpu = head["times"][0][1]["ratio"], head["gpu"]["recipes"]["default"]["ratio"]
    clamps, groups = edit["clamps"], edit["groups"]
    own, control = (edit["average"](groups, kind, "telling") for kind in ("edited", "control"))
    return [
        Claim("validation loss stays within 5 % of the model without a head",
              SHOWN if losses["source"] <= 5 else PART,
              f"the source's losses {losses['source']:+.1f} %, a tenth of them "
              f"{losses['light']:+.1f} %, ours, which do not reach the model, 0", "prototype_head"),
        Claim("training time hardly changes", PART,
              f"a step × {step:.2f} on a CPU, × {gpu:.1f} on a GPU before it was rewritten",
              "prototype_head"),
        Claim("a clamped prototype steers text to its subject", PART,
              f"recognised in {edit['recognised'](clamps, 'edited')} texts, random prototypes "
              f"{edit['recognised'](clamps, 'control')}", "edits"),
        Claim("a category can be strengthened", SHOWN if own > control else NOT,
              f"{own:.0%} of the tokens are its words, random prototypes {control:.0%}", "edits"),
    ]  # fmt: skip


def _protot(read: Callable[..., Any]) -> list[Claim]:
    model, glue = prototype_mixer.figures(read), prototype_mixer_glue.figures(read)
    texts, inside, time = (
        page.figures(read) for page in (prototype_mixer_robustness, channels, mixer)
    )
    last = model["four"][max(model["four"])]
    ours = last["protot"]["perplexity"] / last["llama"]["perplexity"]
    theirs = model["theirs"]["protot"][0] / model["theirs"]["llama"][0]
    lengths = (model["lengths"][0], model["lengths"][-1])
    short, long = (
        fmean(model["ratios"](*(model["contexts"][f"{n}-at-{at}"] for n in ("protot", "llama"))))
        for at in lengths
    )
    locality, clamped = inside["value"]["locality"]["spearman"], texts["protot"]
    local = locality["rho"] < 0 and locality["p"] < 0.05
    sparse = [row["sparsity_ratio"] for row in inside["value"]["measures"]["write"]]
    moved = counted(inside["won"], len(inside["effects"]))
    rows = [
        Claim("perplexity is near that of attention", PART,
              f"{ours:.2f} × LLaMA's, the source {theirs:.2f} ×; one learning rate",
              "prototype_mixer"),
        Claim("it falls behind attention as contexts grow", SHOWN if long > short else NOT,
              f"{short:.2f} × LLaMA's at {lengths[0]}, {long:.2f} × at {lengths[1]:,}",
              "prototype_mixer"),
        Claim("linear time beats attention on long texts", PART,
              f"a step at 4,096: LLaMA {time['headline'][0]['ratio']:.2f} × on a CPU, "
              f"{time['headline'][1]['ratio']:.2f} × on a GPU before it was rewritten", "mixer"),
        Claim("a channel holds a concept, and without it the model misses its words", moved,
              f"{inside['won']} of {len(inside['effects'])} channels beat other channels",
              "channels"),
        Claim("a short half-life goes with repetition", SHOWN if local else NOT,
              f"Spearman's ρ {locality['rho']:+.2f} (p {locality['p']:.2g})", "channels"),
        Claim("gates get sparser with depth", SHOWN if sparse == sorted(sparse) else NOT,
              "max over mean " + ", ".join(f"{ratio:.1f}" for ratio in sparse), "channels"),
        Claim("routing carries the change when texts are reworded",
              counted(min(clamped["lower"], clamped["better"]), clamped["slices"]),
              f"clamping lowers it in {clamped['lower']} of {clamped['slices']} kinds, and by more "
              f"than another text's routing in {clamped['better']}", "prototype_mixer_robustness"),
    ]  # fmt: skip
    for said, answer, figure in glue["claims"]:
        judged = SHOWN if answer == "shown" else answer
        rows.append(Claim(f"GLUE: {said}", judged, figure, "prototype_mixer_glue"))
    for claims in texts["claims"]:
        rows += [
            Claim(said, _of_slices(found), found.replace("**", ""), "prototype_mixer_robustness")
            for said, found in claims
        ]
    return rows


def _of_slices(found: str) -> str:
    """Return the verdict of ``raw 3 of 7 (opposite 2); matched …``, by its first measure."""
    words = found.replace("**", "").split(";")[0].split()
    number = words.index("of")
    return counted(int(words[number - 1]), int(words[number + 1]))


def _prisma(read: Callable[..., Any]) -> list[Claim]:
    page = uncertainty_feedback.figures(read)
    losses = {row[0]: row for row in page["losses"]}
    best = losses["interpolated, from zero"]
    uses = [row[0] for row in page["signals"] if row[-1].startswith("yes")]
    decode = {
        device: one["timed"]["decode"]["one pass"]["elapsed"]["ratio"] - 1
        for device, one in page["timings"].items()
    }
    said = {
        "ablation": "without its signal a model predicts worse",
        "attention": "uncertain positions are attended to more in later layers",
        "hedging": "it hedges more after uncertain predictions",
        "recovery": "it recovers better from mistakes",
        "probe": "the signal can be read inside the model",
    }
    rows = [
        Claim("feedback helps prediction", NOT,
              f"loss less no feedback {best[2]}, less shuffled codes {best[3]}",
              "uncertainty_feedback"),
        Claim("the model comes to use the signal", counted(len(uses), len(page["signals"])),
              f"{len(uses)} of {len(page['signals'])} ways to train it", "uncertainty_feedback"),
        Claim("less than 1 % more computing", counted(sum(x < 0.01 for x in decode.values()), 2),
              ", ".join(f"{device} {more:+.1%}" for device, more in decode.items()),
              "uncertainty_feedback"),
    ]  # fmt: skip
    for check, *answers in page["answers"]:
        shown = sum("**" in answer for answer in answers)
        words = f"{shown} of {len(answers)} models"
        rows.append(Claim(said[check], counted(shown, len(answers)), words, "uncertainty_feedback"))
    return rows


def _signal_noise(read: Callable[..., Any]) -> list[Claim]:
    page = signal_noise_attention.figures(read)
    apart = {name: difference for name, _, difference in page["losses"] if difference}
    reach = {row[0]: row for row in page["reach"]}[DEFAULT]
    cross, beyond = page["cross_apart"], page["beyond_apart"]
    least = [name for name, difference in cross.items() if difference.sign < 0]
    trained, random = page["gains"]["spectra"], page["gains"]["untrained"]
    name = "signal_noise_attention"
    return [
        Claim("a ratio of π beats other ratios", verdict(apart["ratio 2"], 1),
              f"ratio 2 less π {apart['ratio 2'].shown()}", name),
        Claim("it beats GPT-2", verdict(apart["GPT-2"], 1),
              f"GPT-2 less it {apart['GPT-2'].shown()}", name),
        Claim("noise heads help", verdict(apart["λ = 0"], 1),
              f"without them {apart['λ = 0'].shown().replace('**', '')}", name),
        Claim("signal heads reach further than noise heads", PART,
              f"{reach[1]} against {reach[2]} positions, uniform attention {reach[3]}", name),
        Claim("heads take grammatical roles", NOT,
              f"heads beyond chance by seed: {page['roles'][DEFAULT]}", name),
        Claim("a layer raises ΔR", PART,
              f"{trained:+.2f} nats, random weights {random:+.2f}", name),
        Claim("π keeps the two groups apart best", counted(len(least), len(cross)),
              f"further than {', '.join(least) or 'none'}; tried: {', '.join(cross)}", name),
        Claim("lower loss beyond the trained length", verdict(beyond["ratio 1"], -1),
              f"π less ratio 1 {beyond['ratio 1'].shown('+.3f')}", name),
    ]  # fmt: skip
