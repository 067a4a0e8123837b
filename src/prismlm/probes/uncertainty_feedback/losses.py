"""What other codes than a model's own do to its loss: ablation, prefill, and planted mistakes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.models.seam import output_embedding
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
from prismlm.statistics import Interval, bootstrap

FAR = 0.01
"""A code that is further off, as a share of all levels, and by more than one, is no rounding."""
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
        ``loss`` in nats a token, over permutations the mean; its ``perplexity``; ``change`` of the
        loss against the own signal, paired by text; ``perplexity_change``, exp(change) − 1; and
        the change ``by_permutation``.
    """
    model, _, texts, codes, options, progress = reading
    counts = predictions_of(texts)
    draws: dict[str, list[Codes]] = {
        "own": [codes],
        "zero": [no_codes(texts)],
        "neutral": [neutral_codes(texts, feedback_of(model).embedding.levels)],
        "shuffled": [permuted(codes, options.seed + n) for n in range(options.permutations)],
    }
    rows: list[Row] = []
    own = np.zeros(0)
    for signal, given in draws.items():
        title = f"{signal.capitalize()} signal"
        sums = [summed(replay(model, texts, c, progress=progress, title=title)) for c in given]
        loss = float(np.mean(sums, 0).sum() / counts.sum())
        row: Row = {"signal": signal, "loss": loss, "perplexity": math.exp(loss)}
        if signal == "own":
            (own,) = sums
        else:
            apart = [one - own for one in sums]
            change = bootstrap(np.mean(apart, 0), counts, seed=options.seed)
            ratio = (math.expm1(x) for x in (change.value, change.low, change.high))
            row |= {"change": change, "perplexity_change": Interval(*ratio)}
        if signal == "shuffled":
            row["by_permutation"] = [float((one - own).sum() / counts.sum()) for one in sums]
        rows.append(row)
    codes_used = different(codes)
    columns = {"signal": "", "loss": ".4f", "perplexity": ".2f", "change": "+.4f",
               "perplexity_change": "+.2%"}  # fmt: skip
    facts = {"texts": len(texts), "tokens": int(counts.sum()), "codes": codes_used}
    change = rows[3]["change"] if codes_used > 1 else None
    said = finding("ablation: loss, shuffled codes − own", change, rows[1]["change"].value)
    title = "Ablation: loss with another signal, nats a token"
    return Table(title, columns, tuple(rows), facts, (said,))


def prefill_gap(reading: Reading) -> Table:
    """Return how far the codes of 1, 2, … ``passes`` passes are from those token by token.

    Returns:
        Rows by ``passes``: shares of positions whose code is ``differing`` from the recursion's,
        and ``far`` from it, by more than 1 % of the levels and more than one; mean ``distance`` of
        the codes over levels − 1; ``loss``, nats a token, and ``loss_change`` against the
        recursion's codes, paired by text. The fact ``rounding`` is the largest difference between
        a token's loss read at once with the recursion's codes and token by token.
    """
    model, _, texts, _, options, progress = reading
    levels = feedback_of(model).embedding.levels
    true, cached = recursion(model, texts, progress=progress)
    at_once = replay(model, texts, true, progress=progress)
    counts, expected = predictions_of(texts), summed(at_once)
    rows: list[Row] = []
    for codes, replays in pass_codes(model, texts, options.passes, progress=progress):
        sums = summed(replays)
        pairs = zip(codes, true, strict=True)
        apart = torch.cat([(a[1:] - b[1:]).abs() for a, b in pairs]).double().numpy() / (levels - 1)
        rows.append(
            {
                "passes": len(rows) + 1,
                "differing": float((apart > 0).mean()),
                "far": float((apart * (levels - 1) > max(1, FAR * (levels - 1))).mean()),
                "distance": float(apart.mean()),
                "loss": float(sums.sum() / counts.sum()),
                "loss_change": bootstrap(sums - expected, counts, seed=options.seed),
            }
        )
    both = zip(cached, at_once, strict=True)
    rounding = max(float((a.losses - b.losses).abs().max()) for a, b in both)
    columns = {"passes": "", "differing": ".1%", "far": ".1%", "distance": ".2%",
               "loss_change": "+.4f"}  # fmt: skip
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
        Rows by ``signal``, of :data:`SIGNALS`, fed to both texts: ``entropy`` and ``loss`` at steps
        1 … k, less those of the intact text, nats; their ``mean_entropy`` and ``summed_loss``;
        ``recovered_after``, the first step whose mean loss is within ``tolerance``, or None; and
        how much less loss and entropy the own signal has, ``own_loss_less`` this one's and
        ``own_entropy_less``, paired by text.
    """
    model, tokenizer, texts, codes, options, progress = reading
    steps, draws, seed = options.steps, options.mistakes, options.seed
    kept = longer_than(texts, steps + 2)
    rows, own = [texts[n] for n in kept], tuple(codes[n] for n in kept)
    weight = output_embedding(model).weight
    assert isinstance(weight, Tensor)
    vocabulary = min(len(tokenizer), int(model.config.get_text_config().vocab_size))
    pool = np.setdiff1d(np.arange(vocabulary), tokenizer.all_special_ids)
    effects = np.zeros((draws, len(SIGNALS), 2, len(rows), steps))
    still = [replay(model, rows, fed) for fed in (own, no_codes(rows))]
    rng, codes_fed = np.random.default_rng(seed), 0
    with progress.task("Planting mistakes", draws * len(rows), "mistakes") as task:
        for draw in range(draws):
            places = [int(rng.integers(1, len(row) - steps)) for row in rows]
            pairs = zip(rows, places, strict=True)
            planted = [plant_mistake(row, at, pool, rng) for row, at in pairs]
            theirs, mixed = own_codes(model, planted, options.signal), seed + 1 + draw
            intact = [*still, replay(model, rows, permuted(own, mixed))]
            codes_fed = max(codes_fed, different((*own, *theirs)))
            fed = (theirs, no_codes(rows), permuted(theirs, mixed))
            for number, each in enumerate(fed):
                wrong = replay(model, planted, each)
                effects[draw, number] = excess(wrong, intact[number], places, steps)
            task.advance(len(rows))
    effects[:, :, 0] *= math.log(len(weight))
    return recovery_table(effects.mean(0), draws, seed, codes_fed)


def plant_mistake(text: Tensor, place: int, pool: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Return a text with another token at ``place``, drawn from ``pool``."""
    wrong = text.clone()
    wrong[place] = int(rng.choice(pool[pool != int(text[place])]))
    return wrong


def excess(
    wrong: Sequence[Replay], intact: Sequence[Replay], places: Sequence[int], steps: int
) -> Float[np.ndarray, "2 texts k"]:
    """Return what predictions at p … p + k − 1 have more of: entropy over ln V, and loss.

    The first has just read the token at p; its loss is that of the token at p + 1.
    """
    rows = [
        torch.stack([x[at : at + steps].double() for x in (a.shares, a.losses)])
        - torch.stack([x[at : at + steps].double() for x in (b.shares, b.losses)])
        for a, b, at in zip(wrong, intact, places, strict=True)
    ]
    return torch.stack(rows, 1).numpy()


def recovery_table(
    effects: Float[np.ndarray, "signals 2 texts k"], draws: int, seed: int, codes: int
) -> Table:
    """Return the table of :func:`mistakes`, of entropies and losses after a mistake."""
    entropies, losses = effects[:, 0].mean(-1), effects[:, 1].sum(-1)
    rows: list[Row] = []
    for number, signal in enumerate(SIGNALS):
        entropy, loss = effects[number].mean(1)
        back = np.flatnonzero(loss <= TOLERANCE)
        row = {
            "signal": signal,
            "mean_entropy": bootstrap(entropies[number], seed=seed),
            "summed_loss": bootstrap(losses[number], seed=seed),
            "recovered_after": int(back[0]) + 1 if len(back) else None,
            "entropy": entropy.tolist(),
            "loss": loss.tolist(),
        }
        if number:
            row["own_entropy_less"] = bootstrap(entropies[0] - entropies[number], seed=seed)
            row["own_loss_less"] = bootstrap(losses[0] - losses[number], seed=seed)
        rows.append(row)
    findings = tuple(
        finding(
            f"mistakes: loss, own signal − {row['signal']}",
            row["own_loss_less"] if codes > 1 else None,
            row["summed_loss"].value,
        )
        for row in rows[1:]
    )
    columns = {"signal": "", "mean_entropy": "+.3f", "summed_loss": "+.3f", "recovered_after": "",
               "own_loss_less": "+.3f"}  # fmt: skip
    facts = {"texts": effects.shape[2], "draws": draws, "tolerance": TOLERANCE, "codes": codes}
    title = (
        f"After a planted wrong token: nats over {effects.shape[3]} tokens, less the intact text's"
    )
    return Table(title, columns, tuple(rows), facts, findings)
