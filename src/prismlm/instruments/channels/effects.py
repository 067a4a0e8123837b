"""What interventions on channels do to the probability of words, beside control channels.

Source: ProtoT, A.3, Tables 6 to 9. The source picks its control by hand; here controls are drawn,
and a channel is compared with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from prismlm.edits.channels.interventions import Intervention, MaskRead, MaskWrite, Reinitialise
from prismlm.edits.channels.scope import intervene
from prismlm.errors import InputError
from prismlm.instruments.channels.case_files import Probe
from prismlm.instruments.channels.effect_table import Channel, EffectTable, Measured, TableOptions
from prismlm.models.decoders.mixers import check_channel, check_layer, mixers_of
from prismlm.models.seam import run_decoder
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RANDOM = "reinitialise"
BUILD: dict[str, Callable[[int, int, int], Intervention]] = {
    RANDOM: Reinitialise,
    "mask_write": lambda layer, channel, _: MaskWrite(layer, channel),
    "mask_read": lambda layer, channel, _: MaskRead(layer, channel),
    "mask_write_renormalised": lambda layer, channel, _: MaskWrite(layer, channel, True),
    "mask_read_renormalised": lambda layer, channel, _: MaskRead(layer, channel, True),
}


def effects_on(
    model: PreTrainedModel,
    probes: Sequence[Probe],
    channels: Sequence[Channel],
    options: TableOptions | None = None,
    *,
    progress: Reporter = SILENT,
    **settings: Any,
) -> EffectTable:
    """Measure what interventions on channels do to the targets of cases.

        relative change = 100 (p′ / p − 1) %   (Table 6),   100 (p′ − p) points   (Table 7)

    p is the probability of the target after the context, p′ with the intervention. Several random
    prototypes are drawn for one channel, and p′ is their mean.

    Args:
        model: with prototype mixers, in evaluation mode.
        probes: contexts and targets, as tokens.
        channels: (layer, channel) of each.
        options: how to measure; None for ``settings``, of :class:`TableOptions`.
        progress: is shown every channel.

    Raises:
        InputError: an unknown channel or intervention, too few channels to draw controls from, or
            no case that is probable enough.
    """
    by = TableOptions(**settings) if options is None else options
    if not probes or not channels:
        raise InputError(
            f"{len(probes)} cases and {len(channels)} channels: expected at least 1 of both."
        )
    chosen = tuple(dict.fromkeys((int(layer), int(channel)) for layer, channel in channels))
    drawn = {place: draw_controls(model, place, by, exclude=chosen) for place in chosen}
    baseline = target_probabilities(model, probes)
    kept = _probable(baseline, by.minimum_probability)
    used = tuple(probes[i] for i in kept)
    measured: dict[tuple[Channel, str], Measured] = {}
    places = list(dict.fromkeys([*chosen, *(c for row in drawn.values() for c in row)]))
    with progress.task("Intervening", len(places), unit="channels") as task:
        for place in places:
            for name in by.interventions:
                measured[place, name] = _measured(model, used, place, name, by)
            task.advance()
    left = tuple(probe for i, probe in enumerate(probes) if i not in set(kept))
    return EffectTable(used, left, baseline[kept], chosen, drawn, measured, by)


def _probable(baseline: Tensor, minimum: float) -> list[int]:
    """Return which targets are probable enough for a change of theirs to say something."""
    kept = (baseline >= minimum).nonzero()[:, 0].tolist()
    if not kept:
        raise InputError(
            f"none of {len(baseline)} cases has a target of probability {minimum:g} or more (the "
            f"highest is {float(baseline.max()):.2g}): the model does not expect these words, so "
            "their change says nothing. Give other cases or a lower minimum."
        )
    return kept


def draw_controls(
    model: PreTrainedModel,
    place: Channel,
    by: TableOptions,
    exclude: Sequence[Channel] = (),
) -> tuple[Channel, ...]:
    """Draw control channels for one; a function of the seed and of the channel's place.

    Raises:
        InputError: an unknown channel, or too few channels.
    """
    mixers = mixers_of(model)
    layer, channel = place
    check_layer(len(mixers), layer)
    check_channel(mixers[layer].channels, layer, channel)
    layers = (layer,) if by.control_from == "layer" else range(len(mixers))
    barred = {place, *exclude}
    places = [(i, k) for i in layers for k in range(mixers[i].channels)]
    free = [candidate for candidate in places if candidate not in barred]
    _check_controls(by, len(free), f"channel {channel} of layer {layer}")
    generator = np.random.default_rng([by.seed, layer, channel])
    picked = generator.choice(len(free), by.controls, replace=False)
    return tuple(free[i] for i in sorted(picked.tolist()))


def _measured(
    model: PreTrainedModel, probes: Sequence[Probe], place: Channel, name: str, by: TableOptions
) -> Measured:
    runs: list[Tensor] = []
    for seed in range(by.seed, by.seed + (by.reinitialisations if name == RANDOM else 1)):
        with intervene(model, BUILD[name](*place, seed)):
            runs.append(target_probabilities(model, probes))
    stacked = torch.stack(runs)
    return Measured(stacked.mean(0), stacked.std(0) if len(runs) > 1 else None)


def check_controls(model: PreTrainedModel, by: TableOptions) -> None:
    """Raise InputError where no channel of a model has so many controls, before one is known."""
    sizes = [mixer.channels for mixer in mixers_of(model)]
    others = (max(sizes) if by.control_from == "layer" else sum(sizes)) - 1
    _check_controls(by, others, "one channel")


def _check_controls(by: TableOptions, free: int, of: str) -> None:
    if not 1 <= by.controls <= free:
        raise InputError(
            f"{by.controls} control channels for {of}: expected 1 to {free}, the channels of the "
            f"{by.control_from} that are not measured themselves."
        )


TOKENS_PER_BATCH = 4096
# Rows of logits formed at once.
LOGIT_ROWS = 64


@torch.no_grad()
def target_probabilities(model: PreTrainedModel, probes: Sequence[Probe]) -> Float64[Tensor, " n"]:
    """Return p(target | context) of each probe, with what interventions hold; on the CPU.

    Contexts of like length are read together, ``TOKENS_PER_BATCH`` positions at a time with
    padding or one context where it is longer; logits are formed at the last positions only.

    Raises:
        InputError: the model is in training mode, in which dropout would move probabilities.
    """
    if model.training:
        raise InputError("the model is in training mode: call model.eval() before measuring it.")
    found = torch.empty(len(probes), dtype=torch.float64)
    for members in _batches(probes):
        chosen = [probes[i] for i in members]
        lengths = torch.tensor([len(probe.ids) for probe in chosen])
        ids = pad_sequence([torch.tensor(probe.ids) for probe in chosen], batch_first=True)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        states = run_decoder(model, ids, mask).last_hidden_state
        hidden = states[torch.arange(len(chosen)), (lengths - 1).to(model.device)]
        targets = torch.tensor([probe.target_id for probe in chosen], device=model.device)
        found[members] = probabilities_at(model, hidden, targets).cpu()
    return found


def probabilities_at(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor
) -> Float64[Tensor, " n"]:
    """Return the probability of ``targets`` [n] after last hidden states [n, d]."""
    head: Any = model.get_output_embeddings()
    parts = [
        head(rows).double().log_softmax(-1).gather(1, wanted[:, None])[:, 0].exp()
        for rows, wanted in zip(hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
    ]
    return torch.cat(parts)


def _batches(probes: Sequence[Probe]) -> Iterator[list[int]]:
    order = sorted(range(len(probes)), key=lambda i: len(probes[i].ids))
    members: list[int] = []
    for i in order:
        if members and (len(members) + 1) * len(probes[i].ids) > TOKENS_PER_BATCH:
            yield members
            members = []
        members.append(i)
    if members:
        yield members
