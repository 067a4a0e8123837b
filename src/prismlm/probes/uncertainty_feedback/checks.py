"""What a model predicts and writes with other codes than its own, and the report of all checks."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.errors import InputError, check_choice
from prismlm.models.device import check_window
from prismlm.models.uncertainty_feedback import CODES
from prismlm.models.watch import evaluating
from prismlm.ops.uncertainty_feedback import quantise
from prismlm.probes.results import Report, Row, Table, finding
from prismlm.probes.texts import Sample
from prismlm.probes.uncertainty_feedback import internals
from prismlm.probes.uncertainty_feedback.signal import (
    DEFAULTS,
    CheckInputs,
    Codes,
    InspectOptions,
    batches_of,
    cache_of,
    count_codes,
    feedback_of,
    long_texts,
    no_codes,
    own_codes,
    permute_codes,
    relative_entropies,
    replay,
    stack,
)
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import bootstrap

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
        "neutral": [own_codes(model, texts, passes=1)],
        "shuffled": [permute_codes(codes, options.seed + n) for n in range(options.permutations)],
    }
    rows: list[Row] = []
    own = np.zeros(len(texts))
    for signal, draw in draws.items():
        title = f"{signal.capitalize()} signal"
        replays = (replay(model, texts, c, progress=progress, title=title) for c in draw)
        sums = np.mean([[float(p.losses.sum()) for p in replayed] for replayed in replays], 0)
        loss = float(sums.sum() / counts.sum())
        row: Row = {"signal": signal, "loss": loss, "perplexity": math.exp(loss)}
        if signal == "own":
            own = sums
        else:
            row["change"] = bootstrap(sums - own, counts, seed=options.seed)
        rows.append(row)
    codes_used = count_codes(codes)
    columns = "signal loss:.4f perplexity:.2f change:+.4f"
    facts = {"texts": len(texts), "tokens": int(counts.sum()), "codes": codes_used}
    change = rows[3]["change"] if codes_used > 1 else None
    result = finding("ablation: loss, shuffled codes − own", change, rows[1]["change"].value)
    title = "Ablation: loss with another signal, nats per token"
    return Table(title, columns, tuple(rows), facts, (result,))


def mistakes(inputs: CheckInputs) -> Table:
    """Replace one token of each text by a random one and compare the k predictions after it.

    At steps 1 … k the model predicts the tokens after the wrong one, which is never a special
    token; text and mistake are the same for every signal. The planted text's own codes are computed
    as those of the intact text. Shuffled codes of both texts have the same permutation.
    Source: PRISMA, "Does it recover better from mistakes?"; the controls are ours.

    Rows are by ``signal`` fed to both texts: ``loss`` at steps 1 … k minus that of the intact text,
    nats; its sum, ``summed_loss``; and ``own_loss_less``, the sum with its own signal minus this
    one, paired by text.
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
            planted_codes, permutation = own_codes(model, planted, options.passes), seed + 1 + draw
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
    return mistakes_table(losses.mean(0), options, codes_used)


def mistakes_table(
    losses: Float[np.ndarray, "signals texts k"], options: InspectOptions, codes: int
) -> Table:
    """Return the table of :func:`mistakes` from the losses after a mistake."""
    own = losses[0].sum(-1)
    rows: list[Row] = []
    for signal, loss in zip(SIGNALS, losses, strict=True):
        summed = loss.sum(-1)
        row: Row = {"signal": signal, "summed_loss": bootstrap(summed, seed=options.seed)}
        if rows:
            row["own_loss_less"] = bootstrap(own - summed, seed=options.seed)
        rows.append(row | {"loss": loss.mean(0).tolist()})
    findings = tuple(
        finding(
            f"mistakes: loss, own signal − {row['signal']}",
            row["own_loss_less"] if codes > 1 else None,
            row["summed_loss"].value,
        )
        for row in rows[1:]
    )
    columns = "signal summed_loss:+.3f own_loss_less:+.3f"
    count, steps = losses.shape[1:]
    facts = {"texts": count, "draws": options.mistakes, "codes": codes}
    title = f"After a planted wrong token: loss over {steps} tokens minus the intact text's, nats"
    return Table(title, columns, tuple(rows), facts, findings)


class Counts(NamedTuple):
    """Hedging words in the continuations with one signal."""

    after: Float[np.ndarray, "texts 4"]  # hedges and tokens after high steps, and after low steps
    hedges: int


def hedging(inputs: CheckInputs) -> Table:
    """Let a model continue the starts of texts and count hedging words by the entropy before them.

    The prompt is the first 16 tokens of a text, or its first half if it is shorter. A step is a
    prediction; it is high if its entropy is in the top quarter of the run's steps, and low if in
    the bottom quarter. Its code is fed with the token sampled from it, so the k tokens after that
    token count, up to the end of the text. Shuffled codes are those of the first run, permuted over
    all of its positions. Source: PRISMA, "Behavioral test"; both controls are ours.

    Rows are by ``signal``: the number of ``hedges``, hedging words; the share of the k tokens
    ``after_high`` and ``after_low`` steps that begin one; their ``difference``; and ``own_less``,
    that with its own signal minus this one, paired by text. The last four are None for equal
    entropies.
    """
    texts, codes, options = inputs.texts, inputs.codes, inputs.options
    prompts = [text[: min(PROMPT_TOKENS, max(1, len(text) // 2))] for text in texts]
    own = tuple(row[: len(prompt)] for row, prompt in zip(codes, prompts, strict=True))
    runs = {"own": continuations(inputs, prompts, own)}
    pairs, levels = zip(own, runs["own"], strict=True), feedback_of(inputs.model).levels
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
    after = hedges_after(entropies, starts, inputs.options.steps)
    return Counts(after, int(sum(map(np.sum, starts))))


def hedging_table(counts: Mapping[str, Counts], options: InspectOptions) -> Table:
    """Return the table of :func:`hedging` from the counts with each signal."""
    rows: list[Row] = []
    for signal, (after, hedges) in counts.items():
        row: Row = {"signal": signal, "hedges": hedges}
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
    columns = "signal hedges after_high:.2% after_low:.2% difference:+.2% own_less:+.2%"
    facts = {"texts": len(counts["own"].after)}
    title = f"Hedging words in the {options.steps} tokens after steps of high and low entropy"
    return Table(title, columns, tuple(rows), facts, findings)


def hedges_after(
    entropies: Sequence[Float[np.ndarray, " S"]],
    starts: Sequence[Bool[np.ndarray, " S"]],
    window: int,
) -> Float[np.ndarray, "texts 4"]:
    """Count hedging words in the tokens t + 1 … t + k after high and low steps t.

    Returned is ``after`` of :class:`Counts`, zeros if all entropies are equal.
    """
    # Only steps that are followed by k tokens count.
    eligible = [values[: max(0, len(values) - window)] for values in entropies]
    pool = np.concatenate(eligible)
    counts = np.zeros((len(entropies), 4))
    low, high = np.quantile(pool, [0.25, 0.75]) if len(pool) else (0, 0)
    if low == high:
        return counts
    for text, (values, begins) in enumerate(zip(eligible, starts, strict=True)):
        total = np.concatenate([[0], np.cumsum(begins)])
        after = total[1 + window :][: len(values)] - total[1 : 1 + len(values)]
        for column, chosen in ((0, values >= high), (2, values <= low)):
            counts[text, column] = after[chosen].sum()
            counts[text, column + 1] = chosen.sum() * window
    return counts


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
                chosen = draw_tokens(logits, torch.from_numpy(draws[batch, step]))
                steps.append((chosen, relative_entropies(logits)))
                ids, step_codes = chosen[:, None], following[:, step : step + 1]
                task.advance(len(batch))
            columns = (torch.stack(column, 1) for column in zip(*steps, strict=True))
            results |= zip(batch, map(Continuation, *columns), strict=True)
    return tuple(results[index] for index in range(len(prompts)))


def draw_tokens(logits: Float[Tensor, "B V"], draws: Float[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """Return the tokens at quantiles ``draws`` (0 to 1) of softmax(logits)."""
    cumulative = logits.double().softmax(-1).cumsum(-1).cpu()
    targets = draws[:, None].double() * cumulative[:, -1:]
    return (cumulative <= targets).sum(-1).clamp_max(cumulative.shape[-1] - 1)


CHECKS: dict[str, tuple[Callable[[CheckInputs], Table], int, int | None]] = {
    "ablation": (ablation, 4, 2),
    "attention": (internals.attention_probe, 8, internals.MIN_LATER + 2),
    "hedging": (hedging, 4, 2),
    "mistakes": (mistakes, 4, None),
    "probe": (internals.code_probe, 6, 2),
}
"""Each check with its minimum number of texts and of tokens per text; None: ``steps`` + 2."""


def inspect_uncertainty_feedback(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sample: Sample,
    checks: Sequence[str] = (),
    *,
    name: str = "",
    options: InspectOptions = DEFAULTS,
    progress: Reporter = SILENT,
) -> Report:
    """Check whether a model uses the uncertainty that is fed back to it.

    Intervals and p are over these texts, of one model. A check that the texts are too few or too
    short for, or that this kind of model does not support, is left out with the reason; without any
    other this is an InputError.
    """
    for check in checks:
        check_choice("a check", check, tuple(CHECKS))
    levels = feedback_of(model).levels
    check_window(model, max(map(len, sample.texts)))
    codes = own_codes(model, sample.texts, options.passes, progress=progress)
    inputs = CheckInputs(model, tokenizer, sample.texts, codes, options, progress)
    tables: dict[str, Table] = {}
    left_out: dict[str, str] = {}
    for check in dict.fromkeys(checks or CHECKS):
        function, texts, tokens = CHECKS[check]
        tokens = tokens or options.steps + 2
        try:
            if (count := len(long_texts(sample.texts, tokens))) < texts:
                raise InputError(
                    f"{check} needs at least {texts} texts of at least {tokens} tokens, and "
                    f"{sample.name} has {count}: provide more or longer texts."
                )
            tables[check] = function(inputs)
        except InputError as error:
            left_out[check] = str(error)
    if not tables:
        raise InputError(next(iter(left_out.values())))
    facts = {"sample": sample.name, "texts": len(sample.texts), "tokens": sample.tokens}
    facts |= {"too_short": sample.left_out, "levels": levels, "options": options}
    return Report(name, facts, tables, left_out)
