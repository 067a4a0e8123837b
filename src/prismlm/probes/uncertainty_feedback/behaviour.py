"""What a model predicts and writes with other codes than its own."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.models.device import check_window
from prismlm.models.uncertainty_feedback import CODES
from prismlm.models.watch import evaluating
from prismlm.ops.uncertainty_feedback import quantise
from prismlm.probes.results import Row, Table, finding
from prismlm.probes.uncertainty_feedback.signal import (
    CheckInputs,
    Codes,
    InspectOptions,
    Predictions,
    batches_of,
    cache_of,
    count_codes,
    levels_of,
    long_texts,
    neutral_codes,
    next_codes,
    no_codes,
    own_codes,
    permute_codes,
    recursion,
    relative_entropies,
    replay,
    stack,
)
from prismlm.statistics import bootstrap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOLERANCE = 0.1
"""The loss has recovered when it is within this of the intact text's, nats."""
SIGNALS = ("own", "zero", "shuffled")
PROMPT_TOKENS = 16
HEDGES = (
    "maybe", "perhaps", "possibly", "probably", "presumably", "supposedly", "apparently",
    "seemingly", "likely", "unlikely", "possible", "probable", "might", "may", "could", "seem",
    "seems", "seemed", "appear", "appears", "appeared", "uncertain", "unclear", "unsure",
    "roughly", "approximately",
)  # fmt: skip
"""Our selection of epistemic words. Other uses, as of "May", affect all compared steps alike."""


def ablation(inputs: CheckInputs) -> Table:
    """Return the loss with a model's own signal, without one, and with neutral and shuffled codes.

    A missing vector can hurt a model that was trained with one. Shuffled codes have the same
    frequencies as its own, and only their information is gone. Source: PRISMA, "Ablation test",
    which zeroes the signal; neutral and shuffled are ours.

    Rows are by ``signal``: ``own``, ``zero`` (nothing is added), ``neutral`` (code ⌊levels / 2⌋)
    and ``shuffled`` (its own, permuted among all positions), with the ``loss`` in nats per token,
    averaged over permutations, and its ``change`` from its own signal's, paired by text.
    """
    model, _, texts, codes, options, progress = inputs
    counts = np.array([len(text) - 1.0 for text in texts])
    draws: dict[str, list[Codes]] = {
        "own": [codes],
        "zero": [no_codes(texts)],
        "neutral": [neutral_codes(texts, levels_of(model))],
        "shuffled": [permute_codes(codes, options.seed + n) for n in range(options.permutations)],
    }
    rows: list[Row] = []
    own = np.zeros(len(texts))
    for signal, draw in draws.items():
        title = f"{signal.capitalize()} signal"
        replays = (replay(model, texts, c, progress=progress, title=title) for c in draw)
        sums = np.mean([_text_losses(predictions) for predictions in replays], 0)
        loss = float(sums.sum() / counts.sum())
        row: Row = {"signal": signal, "loss": loss, "perplexity": math.exp(loss)}
        if signal == "own":
            own = sums
        else:
            row["change"] = bootstrap(sums - own, counts, seed=options.seed)
        rows.append(row)
    codes_used = count_codes(codes)
    columns = {"signal": "", "loss": ".4f", "perplexity": ".2f", "change": "+.4f"}
    facts = {"texts": len(texts), "tokens": int(counts.sum()), "codes": codes_used}
    change = rows[3]["change"] if codes_used > 1 else None
    result = finding("ablation: loss, shuffled codes − own", change, rows[1]["change"].value)
    title = "Ablation: loss with another signal, nats per token"
    return Table(title, columns, tuple(rows), facts, (result,))


def _text_losses(predictions: Sequence[Predictions]) -> Float[np.ndarray, " texts"]:
    """Return the total loss of each text, nats."""
    return np.array([float(p.losses.sum()) for p in predictions])


def prefill_gap(inputs: CheckInputs) -> Table:
    """Return how far the codes of 1, 2, … ``passes`` passes are from those token by token.

    Rows are by ``passes``: the share of positions with a ``differing`` code; mean ``distance`` of
    the codes divided by levels − 1; ``loss``, nats per token, and its ``loss_change`` from that
    with the recursion's codes, paired by text. ``rounding`` is the largest difference between the
    losses of a token with the recursion's codes, in one pass and token by token.
    """
    model, _, texts, _, options, progress = inputs
    levels = levels_of(model)
    exact, cached = recursion(model, texts, progress=progress)
    one_pass = replay(model, texts, exact, progress=progress)
    counts, expected = np.array([len(t) - 1.0 for t in texts]), _text_losses(one_pass)
    rows: list[Row] = []
    codes = neutral_codes(texts, levels)
    for passes in range(1, options.passes + 1):
        title = f"Pass {passes} of {options.passes}"
        predictions = replay(model, texts, codes, progress=progress, title=title)
        sums, pairs = _text_losses(predictions), zip(codes, exact, strict=True)
        distances = torch.cat([(a[1:] - b[1:]).abs() for a, b in pairs]).double() / (levels - 1)
        rows.append(
            {
                "passes": passes,
                "differing": float((distances > 0).double().mean()),
                "distance": float(distances.mean()),
                "loss": float(sums.sum() / counts.sum()),
                "loss_change": bootstrap(sums - expected, counts, seed=options.seed),
            }
        )
        codes = next_codes(predictions, levels)
    pairs = zip(cached, one_pass, strict=True)
    rounding = max(float((a.losses - b.losses).abs().max()) for a, b in pairs)
    columns = {"passes": "", "differing": ".1%", "distance": ".2%", "loss_change": "+.4f"}
    facts = {"texts": len(texts), "positions": int(counts.sum()), "levels": levels}
    facts |= {"loss": float(expected.sum() / counts.sum()), "rounding": rounding}
    name = f"prefill: loss, codes of {len(rows)} passes − token by token"
    result = finding(name, rows[-1]["loss_change"], rounding)
    return Table("Prefill against token by token", columns, tuple(rows), facts, (result,))


def mistakes(inputs: CheckInputs) -> Table:
    """Replace one token of each text by a random one and compare the k predictions after it.

    At steps 1 … k the model predicts the tokens after the wrong one, which is never a special
    token; text and mistake are the same for every signal. The planted text's own codes are computed
    as those of the intact text. Shuffled codes of both texts have the same permutation.
    Source: PRISMA, "Does it recover better from mistakes?"; the controls are ours.

    Rows are by ``signal`` fed to both texts: ``loss`` at steps 1 … k minus that of the intact text,
    nats, and its sum; ``recovered_after``, the first step whose mean loss is within ``tolerance``,
    or None; and ``own_loss_less``, the sum with its own signal minus this one, paired by text.
    """
    model, tokenizer, texts, codes, options, progress = inputs
    steps, seed = options.steps, options.seed
    indices = long_texts(texts, steps + 2)
    rows, own = [texts[n] for n in indices], tuple(codes[n] for n in indices)
    vocabulary = min(len(tokenizer), int(model.config.get_text_config().vocab_size))
    candidates = np.setdiff1d(np.arange(vocabulary), tokenizer.all_special_ids)
    losses = np.zeros((options.mistakes, len(SIGNALS), len(rows), steps))
    unshuffled = [replay(model, rows, signal) for signal in (own, no_codes(rows))]
    rng, codes_used = np.random.default_rng(seed), 0
    with progress.task("Planting mistakes", options.mistakes * len(rows), "mistakes") as task:
        for draw in range(options.mistakes):
            positions = [int(rng.integers(1, len(row) - steps)) for row in rows]
            planted = [row.clone() for row in rows]
            for row, position in zip(planted, positions, strict=True):
                row[position] = int(rng.choice(candidates[candidates != int(row[position])]))
            planted_codes, permutation = own_codes(model, planted, options.signal), seed + 1 + draw
            intact = [*unshuffled, replay(model, rows, permute_codes(own, permutation))]
            codes_used = max(codes_used, count_codes((*own, *planted_codes)))
            signals = (planted_codes, no_codes(rows), permute_codes(planted_codes, permutation))
            for number, signal in enumerate(signals):
                wrong = replay(model, planted, signal)
                # The loss at a position is that of the token after it.
                triples = zip(wrong, intact[number], positions, strict=True)
                excess = [(a.losses - b.losses)[at : at + steps] for a, b, at in triples]
                losses[draw, number] = torch.stack(excess).numpy()
            task.advance(len(rows))
    return recovery_table(losses.mean(0), options.mistakes, seed, codes_used)


def recovery_table(
    losses: Float[np.ndarray, "signals texts k"], draws: int, seed: int, codes: int
) -> Table:
    """Return the table of :func:`mistakes` from the losses after a mistake."""
    sums = losses.sum(-1)
    rows: list[Row] = []
    for number, signal in enumerate(SIGNALS):
        loss = losses[number].mean(0)
        recovered = np.flatnonzero(loss <= TOLERANCE)
        row: Row = {"signal": signal, "summed_loss": bootstrap(sums[number], seed=seed)}
        row["recovered_after"] = int(recovered[0]) + 1 if len(recovered) else None
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
    title = f"After a planted wrong token: loss over {steps} tokens minus the intact text's, nats"
    return Table(title, columns, tuple(rows), facts, findings)


class Counts(NamedTuple):
    """Hedging words in the continuations with one signal."""

    after: Float[np.ndarray, "texts 4"]  # hedges and tokens after high steps, and after low steps
    tokens: int  # generated, before the end of each text
    hedges: int
    steps: int  # with a whole window of tokens after them


def hedging(inputs: CheckInputs) -> Table:
    """Let a model continue the starts of texts and count hedging words by the entropy before them.

    The prompt is the first 16 tokens of a text, or its first half if it is shorter. A step is a
    prediction; it is high if its entropy is in the top quarter of the run's steps, and low if in
    the bottom quarter. Its code is fed with the token sampled from it, so the k tokens after that
    token count, up to the end of the text. Shuffled codes are those of the first run, permuted over
    all of its positions. Source: PRISMA, "Behavioral test"; both controls are ours.

    Rows are by ``signal``: generated ``tokens``; ``hedges``, hedging words that begin in them;
    ``steps`` that are followed by k tokens; the share of the k tokens ``after_high`` and
    ``after_low`` steps that begin a hedging word; their ``difference``; and ``own_less``, that with
    its own signal minus this one, paired by text. The last four are None for equal entropies.
    """
    texts, codes, options = inputs.texts, inputs.codes, inputs.options
    prompts = [text[: min(PROMPT_TOKENS, max(1, len(text) // 2))] for text in texts]
    own = tuple(row[: len(prompt)] for row, prompt in zip(codes, prompts, strict=True))
    runs = {"own": continuations(inputs, prompts, own)}
    pairs, levels = zip(own, runs["own"], strict=True), levels_of(inputs.model)
    all_codes = tuple(torch.cat([row, quantise(c.entropies[:-1], levels)]) for row, c in pairs)
    shuffled = permute_codes(all_codes, options.seed + 1)
    for signal, fed in (("none", no_codes(all_codes)), ("shuffled", shuffled)):
        runs[signal] = continuations(inputs, prompts, fed)
    counts = {signal: _count(inputs, prompts, run) for signal, run in runs.items()}
    return hedging_table(counts, options)


def _count(inputs: CheckInputs, prompts: Sequence[Tensor], run: Sequence[Continuation]) -> Counts:
    entropies: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    for prompt, continuation in zip(prompts, run, strict=True):
        ids = continuation.ids.tolist()
        if inputs.tokenizer.eos_token_id in ids:
            ids = ids[: ids.index(inputs.tokenizer.eos_token_id)]
        entropies.append(continuation.entropies.double().numpy()[: len(ids)])
        starts.append(np.array(hedge_starts(inputs.tokenizer, prompt.tolist(), ids), dtype=bool))
    after, steps = hedges_after(entropies, starts, inputs.options.window)
    return Counts(after, sum(map(len, starts)), int(sum(map(np.sum, starts))), steps)


def hedging_table(counts: Mapping[str, Counts], options: InspectOptions) -> Table:
    """Return the table of :func:`hedging` from the counts with each signal."""
    rows: list[Row] = []
    for signal, (after, tokens, hedges, steps) in counts.items():
        row: Row = {"signal": signal, "tokens": tokens, "hedges": hedges, "steps": steps}
        row |= dict.fromkeys(("after_high", "after_low", "difference"))
        total = after.sum(0)
        if total[1] and total[3]:
            row["after_high"], row["after_low"] = (total[::2] / total[1::2]).tolist()
            row["difference"] = bootstrap(after[:, ::2], after[:, 1::2], (1, -1), seed=options.seed)
        if rows and rows[0]["difference"] and row["difference"]:
            both = np.concatenate([counts["own"].after, after], 1)
            row["own_less"] = bootstrap(
                both[:, ::2], both[:, 1::2], (1, -1, -1, 1), seed=options.seed
            )
        rows.append(row)
    any_hedges = any(row["hedges"] for row in rows)
    findings = tuple(
        finding(
            f"hedging: after high less after low, own signal − {row['signal']}",
            row.get("own_less") if any_hedges else None,
            row["difference"] and row["difference"].value,
        )
        for row in rows[1:]
    )
    columns = {"signal": "", "tokens": "", "hedges": "", "after_high": ".2%", "after_low": ".2%",
               "difference": "+.2%", "own_less": "+.2%"}  # fmt: skip
    facts = {"texts": len(counts["own"].after), "window": options.window}
    facts |= {"temperature": options.temperature}
    title = f"Hedging words in the {options.window} tokens after steps of high and low entropy"
    return Table(title, columns, tuple(rows), facts, findings)


def hedges_after(
    entropies: Sequence[Float[np.ndarray, " S"]],
    starts: Sequence[Bool[np.ndarray, " S"]],
    window: int,
) -> tuple[Float[np.ndarray, "texts 4"], int]:
    """Count hedging words in the tokens t + 1 … t + k after high and low steps t.

    Returned are ``after``, zeros if all entropies are equal, and ``steps`` of :class:`Counts`.
    """
    # Only steps that are followed by k tokens count.
    eligible = [values[: max(0, len(values) - window)] for values in entropies]
    pool = np.concatenate(eligible)
    counts = np.zeros((len(entropies), 4))
    low, high = np.quantile(pool, [0.25, 0.75]) if len(pool) else (0, 0)
    if low == high:
        return counts, len(pool)
    for text, (values, begins) in enumerate(zip(eligible, starts, strict=True)):
        total = np.concatenate([[0], np.cumsum(begins)])
        after = total[1 + window :][: len(values)] - total[1 : 1 + len(values)]
        for column, chosen in ((0, values >= high), (2, values <= low)):
            counts[text, column] = after[chosen].sum()
            counts[text, column + 1] = chosen.sum() * window
    return counts, len(pool)


def hedge_starts(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], continuation: Sequence[int]
) -> list[bool]:
    """Return for each token of a continuation whether a hedging word begins in it.

    Only whole words count, in any case, and none that begins in the prompt.
    """

    def decode(ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(ids), **options))

    ids = [*prompt, *continuation]
    # Where the text of each prefix ends; an incomplete character may come and go at its end.
    ends = list(accumulate((len(decode(ids[: end + 1])) for end in range(len(ids))), max))
    pattern = re.compile(rf"\b(?:{'|'.join(HEDGES)})\b", re.IGNORECASE)
    tokens = {bisect_right(ends, match.start()) for match in pattern.finditer(decode(ids))}
    return [token in tokens for token in range(len(prompt), len(ids))]


class Continuation(NamedTuple):
    """A continuation of a prompt: token ids, and the entropy of each prediction divided by ln V."""

    ids: Int64[Tensor, " S"]
    entropies: Float[Tensor, " S"]


def continuations(
    inputs: CheckInputs, prompts: Sequence[Int64[Tensor, " P"]], codes: Codes
) -> tuple[Continuation, ...]:
    """Sample continuations of S ``tokens`` with these codes of prompts [P], then the model's own.

    With codes [P + S − 1] those of the generated tokens are fed too. Every text and step has its
    own random number, whatever codes are fed, so that runs agree until their predictions differ.
    Temperature 0 takes the most likely token.
    """
    model, tokens = inputs.model, inputs.options.tokens
    check_window(model, max(map(len, prompts)) + tokens)
    draws = np.random.default_rng(inputs.options.seed).random((len(prompts), tokens))
    results: dict[int, Continuation] = {}
    with evaluating(model), inputs.progress.task("Generating", len(prompts) * tokens) as task:
        for batch in batches_of(model, prompts):
            ids, cache, fed = stack(prompts, batch), dict[str, Any](), stack(codes, batch)
            step_codes, following = fed.split([ids.shape[1], fed.shape[1] - ids.shape[1]], 1)
            steps: list[tuple[Tensor, Tensor]] = []
            for step in range(tokens):
                # Without codes the model continues with its own, from the cache.
                options = {CODES: step_codes.to(model.device)} if step_codes.numel() else {}
                options |= {"use_cache": True, **cache}
                output: Any = model(input_ids=ids.to(model.device), **options)
                cache, logits = cache_of(output), output.logits[:, -1]
                quantiles = torch.from_numpy(draws[batch, step])
                chosen = draw_tokens(logits, quantiles, inputs.options.temperature)
                steps.append((chosen, relative_entropies(logits)))
                ids, step_codes = chosen[:, None], following[:, step : step + 1]
                task.advance(len(batch))
            columns = (torch.stack(column, 1) for column in zip(*steps, strict=True))
            results |= zip(batch, map(Continuation, *columns), strict=True)
    return tuple(results[index] for index in range(len(prompts)))


def draw_tokens(
    logits: Float[Tensor, "B V"], draws: Float[Tensor, " B"], temperature: float
) -> Int64[Tensor, " B"]:
    """Return the tokens at quantiles ``draws`` (0 to 1) of softmax(logits / temperature)."""
    if not temperature:
        return logits.argmax(-1).cpu()
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1).cpu()
    targets = draws[:, None].double() * cumulative[:, -1:]
    return (cumulative <= targets).sum(-1).clamp_max(cumulative.shape[-1] - 1)
