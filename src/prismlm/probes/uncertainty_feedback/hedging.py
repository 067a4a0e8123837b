"""Does a model hedge more after a prediction of high entropy, and does its signal make it?"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.models.evaluating import evaluating
from prismlm.models.positions import check_window
from prismlm.models.uncertainty_feedback import CODES
from prismlm.ops.uncertainty_feedback import NO_CODE, quantise
from prismlm.probes.results import Row, Table, finding
from prismlm.probes.uncertainty_feedback.signal import (
    Codes,
    InspectOptions,
    Reading,
    cache_of,
    entropies,
    feedback_of,
    no_codes,
    permuted,
    stacked,
    text_batches,
)
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import bootstrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPT = 16
Run = tuple[Float[np.ndarray, "texts 4"], Sequence[np.ndarray], int]
"""Counts of hedging words, where they begin in each text, and how many steps there are."""
HEDGES = (
    "maybe", "perhaps", "possibly", "probably", "presumably", "supposedly", "apparently",
    "seemingly", "likely", "unlikely", "possible", "probable", "might", "may", "could", "seem",
    "seems", "seemed", "appear", "appears", "appeared", "uncertain", "unclear", "unsure",
    "roughly", "approximately",
)  # fmt: skip
"""Written by us from what grammars list as epistemic adverbs, adjectives, modals and verbs.

They are single words, kept although some have other uses ("May"): what is compared is how often
they follow one kind of step and another, and other uses follow both.
"""


def hedging(reading: Reading) -> Table:
    """Let a model continue the starts of texts and count hedging words by the entropy before.

    The prompt of a text is its first 16 tokens, or its first half where it is shorter. A step is a
    prediction; it is high in entropy in the top quarter of its run's steps, and low in the bottom
    one. Its code is fed with the token drawn from it, so the k tokens after that one count, up to
    the end of a text. Shuffled codes are those of the first run, of prompts and of what was
    written, permuted over all of its positions: they say nothing of their steps.
    Source: PRISMA, "Behavioral test"; both controls are ours.

    Returns:
        Rows by ``signal``, own, none or shuffled: ``tokens`` written; ``hedges``, hedging words
        that begin in them; ``steps`` that k tokens follow; the share of the k tokens ``after_high``
        and ``after_low`` steps that begin a hedging word; their ``difference``; and ``own_less``,
        the own run's difference less this one's, paired by text. The last four are None where
        entropies do not differ.
    """
    model, _, texts, codes, options, progress = reading
    prompts = [text[: min(PROMPT, max(1, len(text) // 2))] for text in texts]
    lengths = list(map(len, prompts))
    own = tuple(row[:length] for row, length in zip(codes, lengths, strict=True))
    nothing = tuple(torch.full((options.tokens - 1,), NO_CODE) for _ in prompts)
    how = {"temperature": options.temperature, "seed": options.seed, "progress": progress}
    written = {"own": continuations(model, prompts, own, options.tokens, **how)}
    levels = feedback_of(model).embedding.levels
    pairs = zip(own, written["own"], strict=True)
    whole = tuple(torch.cat([row, quantise(one.shares[:-1], levels)]) for row, one in pairs)
    mixed = list(zip(permuted(whole, options.seed + 1), lengths, strict=True))
    fed = {
        "none": (no_codes(prompts), nothing),
        "shuffled": (tuple(row[:n] for row, n in mixed), tuple(row[n:] for row, n in mixed)),
    }
    for signal, (read, after) in fed.items():
        written[signal] = continuations(
            model, prompts, read, options.tokens, written_codes=after, **how
        )
    runs = {signal: _counted(reading, prompts, one) for signal, one in written.items()}
    return hedging_table(runs, options)


def _counted(reading: Reading, prompts: Sequence[Tensor], written: Sequence[Continuation]) -> Run:
    shares: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    for prompt, (ids, spread) in zip(prompts, written, strict=True):
        ends = np.flatnonzero(ids.numpy() == reading.tokenizer.eos_token_id)
        length = int(ends[0]) if len(ends) else len(ids)
        shares.append(spread.double().numpy()[:length])
        begun = hedge_starts(reading.tokenizer, prompt.tolist(), ids[:length].tolist())
        starts.append(np.array(begun, dtype=bool))
    column, steps = hedges_after(shares, starts, reading.options.window)
    return column, starts, steps


def hedging_table(runs: Mapping[str, Run], options: InspectOptions) -> Table:
    """Return the table of :func:`hedging`, of what :func:`hedges_after` counts by signal."""
    rows: list[Row] = []
    for signal, (column, starts, steps) in runs.items():
        row: Row = {"signal": signal, "tokens": sum(map(len, starts))}
        row |= {"hedges": int(sum(map(np.sum, starts))), "steps": steps}
        row |= dict.fromkeys(("after_high", "after_low", "difference"))
        total = column.sum(0)
        if total[1] and total[3]:
            row["after_high"], row["after_low"] = (total[::2] / total[1::2]).tolist()
            counts = column[:, ::2], column[:, 1::2]
            row["difference"] = bootstrap(*counts, (1, -1), seed=options.seed)
        if rows and rows[0]["difference"] and row["difference"]:
            both = np.concatenate([runs["own"][0], column], 1)
            less = bootstrap(both[:, ::2], both[:, 1::2], (1, -1, -1, 1), seed=options.seed)
            row["own_less"] = less
        rows.append(row)
    words = sum(row["hedges"] for row in rows)
    findings = tuple(
        finding(
            f"hedging: after high less after low, own signal − {row['signal']}",
            row.get("own_less") if words else None,
            row["difference"] and row["difference"].value,
        )
        for row in rows[1:]
    )
    columns = {"signal": "", "tokens": "", "hedges": "", "after_high": ".2%", "after_low": ".2%",
               "difference": "+.2%", "own_less": "+.2%"}  # fmt: skip
    facts = {"texts": len(runs["own"][0]), "window": options.window}
    facts |= {"temperature": options.temperature}
    title = f"Hedging words in the {options.window} tokens after steps of high and low entropy"
    return Table(title, columns, tuple(rows), facts, findings)


def hedges_after(
    shares: Sequence[Float[np.ndarray, " S"]],
    starts: Sequence[Bool[np.ndarray, " S"]],
    window: int,
) -> tuple[Float[np.ndarray, "texts 4"], int]:
    """Count hedging words in the tokens t + 1 … t + k after high and low steps t.

    Returns:
        For each text the words after high steps, tokens after them, and both for low; and how many
        steps there are. Nothing is counted where entropies do not differ.
    """
    # A step counts that has k tokens after its own.
    eligible = [own[: max(0, len(own) - window)] for own in shares]
    pool = np.concatenate(eligible)
    found = np.zeros((len(shares), 4))
    low, high = np.quantile(pool, [0.25, 0.75]) if len(pool) else (0, 0)
    if low == high:
        return found, len(pool)
    for text, (own, begun) in enumerate(zip(eligible, starts, strict=True)):
        total = np.concatenate([[0], np.cumsum(begun)])
        after = total[1 + window :][: len(own)] - total[1 : 1 + len(own)]
        for column, chosen in ((0, own >= high), (2, own <= low)):
            found[text, column] = after[chosen].sum()
            found[text, column + 1] = chosen.sum() * window
    return found, len(pool)


def hedge_starts(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], added: Sequence[int]
) -> list[bool]:
    """Say of each added token whether a hedging word begins in it.

    A word that began in the prompt does not count. Words are whole words, in any case.
    """

    def decoded(ids: Sequence[int]) -> str:
        plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(ids), **plain))

    ids = [*prompt, *added]
    # Where the text of each prefix ends; a part of a character may come and go at its end.
    ends = list(accumulate((len(decoded(ids[: end + 1])) for end in range(len(ids))), max))
    pattern = re.compile(rf"\b(?:{'|'.join(HEDGES)})\b", re.IGNORECASE)
    tokens = {bisect_right(ends, match.start()) for match in pattern.finditer(decoded(ids))}
    return [number in tokens for number in range(len(prompt), len(ids))]


class Continuation(NamedTuple):
    """What a model wrote after a prompt: tokens, and the entropy of each prediction over ln V."""

    ids: Int64[Tensor, " S"]
    shares: Float[Tensor, " S"]


def continuations(
    model: PreTrainedModel,
    prompts: Sequence[Int64[Tensor, " P"]],
    codes: Codes,
    tokens: int,
    *,
    written_codes: Codes | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> tuple[Continuation, ...]:
    """Let a model continue prompts by S ``tokens``, with codes [S − 1] fed or with its own.

    Every text and step has its own random number, the same whatever codes are fed, so that all
    write the same for as long as they predict the same. Temperature 0 takes the likeliest token.
    """
    check_window(model, max(map(len, prompts)) + tokens)
    draws = np.random.default_rng(seed).random((len(prompts), tokens))
    found: dict[int, Continuation] = {}
    feedback_of(model)
    with evaluating(model), progress.task("Writing on", len(prompts) * tokens) as task:
        for numbers in text_batches(model, prompts):
            ids, fed = stacked(prompts, numbers), {CODES: stacked(codes, numbers)}
            given = None if written_codes is None else stacked(written_codes, numbers)
            cached: dict[str, Any] = {}
            written: list[Tensor] = []
            shares: list[Tensor] = []
            for step in range(tokens):
                asked = {name: x.to(model.device) for name, x in ({"input_ids": ids} | fed).items()}
                output: Any = model(**asked, use_cache=True, **cached)
                cached, logits = cache_of(output), output.logits[:, -1]
                shares.append(entropies(logits))
                drawn = torch.from_numpy(draws[numbers, step])
                written.append(draw_tokens(logits, drawn, temperature))
                # The cache has the own.
                fed = {} if given is None else {CODES: given[:, step : step + 1]}
                ids = written[-1][:, None]
                task.advance(len(numbers))
            rows = zip(torch.stack(written, 1), torch.stack(shares, 1), strict=True)
            found |= dict(zip(numbers, (Continuation(*row) for row in rows), strict=True))
    return tuple(found[number] for number in range(len(prompts)))


def draw_tokens(
    logits: Float[Tensor, "B V"], draws: Float[Tensor, " B"], temperature: float
) -> Int64[Tensor, " B"]:
    """Return the tokens at quantiles ``draws`` (0 to 1) of softmax(logits / temperature)."""
    if not temperature:
        return logits.argmax(-1).cpu()
    shares = (logits.double() / temperature).softmax(-1).cumsum(-1).cpu()
    wanted = draws[:, None].double() * shares[:, -1:]
    return (shares <= wanted).sum(-1).clamp_max(shares.shape[-1] - 1)
