"""What other codes than a model's own do to its loss: ablation, prefill, and planted mistakes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.probes.results import Row, Table, finding
from prismlm.probes.uncertainty_feedback.signal import (
    Codes,
    Reading,
    Replay,
    different,
    feedback_of,
    longer_than,
    neutral_codes,
    no_codes,
    own_codes,
    pass_codes,
    permuted,
    predictions_of,
    recursion,
    replay,
    summed,
)
from prismlm.statistics import bootstrap

TOLERANCE = 0.1
"""The loss has recovered when it is within this of the intact text's, nats."""
SIGNALS = ("own", "zero", "shuffled")


def ablation(reading: Reading) -> Table:
    """Return the loss with a model's own signal, with none, a neutral one and a shuffled one.

    A missing vector can hurt a model that was trained with one. Shuffled codes are as frequent as
    the own, so that only their information is gone. Source: PRISMA, "Ablation test", which zeroes
    the signal; neutral and shuffled are ours.

    Returns:
        Rows by ``signal``: ``own``, ``zero`` (nothing is added), ``neutral`` (the code
        ⌊levels / 2⌋ everywhere) and ``shuffled`` (the own, permuted among all positions).
        ``loss`` in nats a token, over permutations the mean; its ``perplexity``; and ``change`` of
        the loss against the own signal, paired by text.
    """
    model, _, texts, codes, options, progress = reading
    counts = predictions_of(texts)
    draws: dict[str, list[Codes]] = {
        "own": [codes],
        "zero": [no_codes(texts)],
        "neutral": [neutral_codes(texts, feedback_of(model).embedding.levels)],
        "shuffled": [permuted(codes, options.seed + n) for n in range(options.permutations)],
    }
    sums: dict[str, np.ndarray] = {}
    for signal, given in draws.items():
        title = f"{signal.capitalize()} signal"
        replays = (replay(model, texts, fed, progress=progress, title=title) for fed in given)
        sums[signal] = np.mean([summed(one) for one in replays], 0)
    rows: list[Row] = []
    for signal, own in sums.items():
        loss = float(own.sum() / counts.sum())
        row: Row = {"signal": signal, "loss": loss, "perplexity": math.exp(loss)}
        if signal != "own":
            row["change"] = bootstrap(own - sums["own"], counts, seed=options.seed)
        rows.append(row)
    codes_used = different(codes)
    columns = {"signal": "", "loss": ".4f", "perplexity": ".2f", "change": "+.4f"}
    facts = {"texts": len(texts), "tokens": int(counts.sum()), "codes": codes_used}
    change = rows[3]["change"] if codes_used > 1 else None
    said = finding("ablation: loss, shuffled codes − own", change, rows[1]["change"].value)
    title = "Ablation: loss with another signal, nats a token"
    return Table(title, columns, tuple(rows), facts, (said,))


def prefill_gap(reading: Reading) -> Table:
    """Return how far the codes of 1, 2, … ``passes`` passes are from those token by token.

    Returns:
        Rows by ``passes``: the share of positions whose code is ``differing`` from the recursion's;
        mean ``distance`` of the codes over levels − 1; ``loss``, nats a token, and ``loss_change``
        against the recursion's codes, paired by text. The fact ``rounding`` is the largest
        difference between a token's loss read at once with the recursion's codes and token by
        token.
    """
    model, _, texts, _, options, progress = reading
    levels = feedback_of(model).embedding.levels
    true, cached = recursion(model, texts, progress=progress)
    at_once = replay(model, texts, true, progress=progress)
    counts, expected = predictions_of(texts), summed(at_once)
    rows: list[Row] = []
    for codes, replays in pass_codes(model, texts, options.passes, progress=progress):
        sums, pairs = summed(replays), zip(codes, true, strict=True)
        apart = torch.cat([(a[1:] - b[1:]).abs() for a, b in pairs]).double() / (levels - 1)
        rows.append(
            {
                "passes": len(rows) + 1,
                "differing": float((apart > 0).double().mean()),
                "distance": float(apart.mean()),
                "loss": float(sums.sum() / counts.sum()),
                "loss_change": bootstrap(sums - expected, counts, seed=options.seed),
            }
        )
    both = zip(cached, at_once, strict=True)
    rounding = max(float((a.losses - b.losses).abs().max()) for a, b in both)
    columns = {"passes": "", "differing": ".1%", "distance": ".2%", "loss_change": "+.4f"}
    facts = {"texts": len(texts), "positions": int(counts.sum()), "levels": levels}
    facts |= {"loss": float(expected.sum() / counts.sum()), "rounding": rounding}
    name = f"prefill: loss, codes of {len(rows)} passes − token by token"
    said = finding(name, rows[-1]["loss_change"], rounding)
    return Table("Prefill against token by token", columns, tuple(rows), facts, (said,))


def mistakes(reading: Reading) -> Table:
    """Replace one token of each text by a random one and compare the k predictions after it.

    At step 1 … k the model predicts the tokens after the wrong one, which is no special token;
    text and mistake are the same for every signal. Codes of the planted text are its own, obtained
    as those of the texts were. Shuffled codes of both texts are permuted alike.
    Source: PRISMA, "Does it recover better from mistakes?"; the controls are ours.

    Returns:
        Rows by ``signal``, of :data:`SIGNALS`, fed to both texts: ``loss`` at steps 1 … k, less
        that of the intact text, nats; its sum, ``summed_loss``; ``recovered_after``, the first step
        whose mean loss is within ``tolerance``, or None; and how much less the own signal has,
        ``own_loss_less``, paired by text.
    """
    model, tokenizer, texts, codes, options, progress = reading
    steps, seed = options.steps, options.seed
    kept = longer_than(texts, steps + 2)
    rows, own = [texts[n] for n in kept], tuple(codes[n] for n in kept)
    vocabulary = min(len(tokenizer), int(model.config.get_text_config().vocab_size))
    pool = np.setdiff1d(np.arange(vocabulary), tokenizer.all_special_ids)
    losses = np.zeros((options.mistakes, len(SIGNALS), len(rows), steps))
    still = [replay(model, rows, fed) for fed in (own, no_codes(rows))]
    rng, codes_fed = np.random.default_rng(seed), 0
    with progress.task("Planting mistakes", options.mistakes * len(rows), "mistakes") as task:
        for draw in range(options.mistakes):
            places = [int(rng.integers(1, len(row) - steps)) for row in rows]
            pairs = zip(rows, places, strict=True)
            planted = [plant_mistake(row, at, pool, rng) for row, at in pairs]
            theirs, mixed = own_codes(model, planted, options.signal), seed + 1 + draw
            intact = [*still, replay(model, rows, permuted(own, mixed))]
            codes_fed = max(codes_fed, different((*own, *theirs)))
            fed = (theirs, no_codes(rows), permuted(theirs, mixed))
            for number, each in enumerate(fed):
                wrong = replay(model, planted, each)
                losses[draw, number] = excess_loss(wrong, intact[number], places, steps)
            task.advance(len(rows))
    return recovery_table(losses.mean(0), options.mistakes, seed, codes_fed)


def plant_mistake(text: Tensor, place: int, pool: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Return a text with another token at ``place``, drawn from ``pool``."""
    wrong = text.clone()
    wrong[place] = int(rng.choice(pool[pool != int(text[place])]))
    return wrong


def excess_loss(
    wrong: Sequence[Replay], intact: Sequence[Replay], places: Sequence[int], steps: int
) -> Float[np.ndarray, "texts k"]:
    """Return what predictions at p … p + k − 1 lose more; that at p is of the token at p + 1."""
    triples = zip(wrong, intact, places, strict=True)
    rows = [(a.losses - b.losses)[at : at + steps] for a, b, at in triples]
    return torch.stack(rows).double().numpy()


def recovery_table(
    losses: Float[np.ndarray, "signals texts k"], draws: int, seed: int, codes: int
) -> Table:
    """Return the table of :func:`mistakes`, of losses after a mistake."""
    sums = losses.sum(-1)
    rows: list[Row] = []
    for number, signal in enumerate(SIGNALS):
        loss = losses[number].mean(0)
        back = np.flatnonzero(loss <= TOLERANCE)
        row: Row = {"signal": signal, "summed_loss": bootstrap(sums[number], seed=seed)}
        row["recovered_after"] = int(back[0]) + 1 if len(back) else None
        row["loss"] = loss.tolist()
        if number:
            row["own_loss_less"] = bootstrap(sums[0] - sums[number], seed=seed)
        rows.append(row)
    findings = tuple(
        finding(
            f"mistakes: loss, own signal − {row['signal']}",
            row["own_loss_less"] if codes > 1 else None,
            row["summed_loss"].value,
        )
        for row in rows[1:]
    )
    columns = {"signal": "", "summed_loss": "+.3f", "recovered_after": "", "own_loss_less": "+.3f"}
    count, steps = losses.shape[1:]
    facts = {"texts": count, "draws": draws, "tolerance": TOLERANCE, "codes": codes}
    title = f"After a planted wrong token: nats over {steps} tokens, less the intact text's"
    return Table(title, columns, tuple(rows), facts, findings)
