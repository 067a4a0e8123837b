"""Edits made ready for one model: which activations they change, and the state that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from prismlm.corpus.pieces import token_alone
from prismlm.edits.values import GROUP_REACH, Ablate, Clamp, Edit, Group, Only, Scale, members_of
from prismlm.errors import InputError, check_choice
from prismlm.index.opened_model import OpenedModel
from prismlm.index.signatures import signature_ids
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, output_embedding
from prismlm.ops.edits import activations_of, move
from prismlm.ops.prototype_head import Routing, reconstruct


class Changes(NamedTuple):
    """What edits do to N states: E edited prototypes, k routed.

    Attributes:
        routing: of the unedited states.
        before: activations of the edited prototypes, [N, E].
        after: their activations α′, [N, E].
        left: states where a clamp is undefined and was left out, bool [N].
        capped: states where a clamp met its cap, bool [N].
    """

    routing: Routing
    before: Tensor
    after: Tensor
    left: Tensor
    capped: Tensor

    @property
    def difference(self) -> Tensor:
        """α′ − α, [N, E]."""
        return self.after - self.before

    @property
    def touched(self) -> Tensor:
        """States in which an activation changes, bool [N]."""
        return (self.difference != 0).any(1)


@dataclass(frozen=True)
class Plan:
    """Edits of one model, checked, in the order in which they act.

    Attributes:
        embedding: the model's output embedding; nothing else of the model is needed.
        head: the prototype head.
        logit_map: what the model does after its output embedding.
        decode: the text of a token, for messages.
        signature: the token that a prototype's card lists first.
        edits: each with the prototypes it acts on.
        only: ``"prototypes"`` drops the residual, ``"residual"`` drops the prototypes.
    """

    embedding: nn.Module
    head: PrototypeHead
    logit_map: LogitMap
    decode: Callable[[int], str]
    signature: Callable[[int], int]
    edits: tuple[tuple[Edit, tuple[int, ...]], ...] = ()
    only: Only | None = None

    def __post_init__(self) -> None:
        if self.only is not None:
            check_choice("only", self.only, ("prototypes", "residual"))
        if self.only == "residual" and self.edits:
            raise InputError(
                "only='residual' leaves no prototypes, so there is nothing to edit: drop the other "
                "edits, or only='residual'."
            )

    def then(self, inner: Plan) -> Plan:
        """Return the plan that does this one's edits first and those of ``inner`` after them.

        Raises:
            InputError: the two are of different heads, or ask for different parts alone.
        """
        if inner.head is not self.head:
            raise InputError("edits of two different heads on one model cannot be nested.")
        if None not in (self.only, inner.only) and self.only != inner.only:
            raise InputError(
                f"only={inner.only!r} inside only={self.only!r} would leave nothing of a state."
            )
        return replace(inner, edits=self.edits + inner.edits, only=self.only or inner.only)

    def leaving_undefined(self) -> Plan:
        """Return the plan with clamps that leave positions where they are undefined."""
        edits = (
            (replace(edit, undefined="leave") if isinstance(edit, Clamp) else edit, members)
            for edit, members in self.edits
        )
        return replace(self, edits=tuple(edits))

    @cached_property
    def prototypes(self) -> Tensor:
        """The edited prototypes, ascending, int64 [E]."""
        ids = sorted({i for _, members in self.edits for i in members})
        return torch.tensor(ids, dtype=torch.int64, device=self.head.prototypes.device)

    @cached_property
    def _signature_tokens(self) -> dict[int, int]:
        clamps = [edit for edit, _ in self.edits if isinstance(edit, Clamp)]
        held = {edit.prototype for edit in clamps if edit.target == "signature"}
        return {prototype: self.signature(prototype) for prototype in held}

    @cached_property
    def _mean_row(self) -> Tensor:
        return cast("Tensor", self.embedding.weight).mean(0, dtype=torch.float32)

    def apply(self, z: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return z′ for states [..., d]; where no edit changes anything, z itself.

        Args:
            z: inputs of the output embedding.
            padding: True where a state is of padding, which no clamp is refused at, [...].

        Raises:
            InputError: a clamp that is undefined at a state.
        """
        if z.numel() == 0 or not (self.edits or self.only):
            return z
        flat = z.flatten(0, -2)
        with torch.autocast(device_type=z.device.type, enabled=False):
            changes = self.changes(flat, None if padding is None else padding.flatten())
            edited = self.edited(flat, changes)
        return z if edited is flat else edited.view_as(z)

    def log_probabilities(self, z: Tensor) -> Tensor:
        """Return the model's own log-probabilities [N, V] from states [N, d], in float32."""
        # forward itself, not the module, whose hooks would edit them.
        return self.logit_map(self.embedding.forward(z).float()).log_softmax(-1)

    def edited(self, z: Tensor, changes: Changes) -> Tensor:
        """Return z′ [N, d] of states and what changes in them; z itself where nothing does."""
        difference = changes.difference
        if self.only is None:
            return move(z, self._rows(z), difference) if bool(difference.any()) else z
        mixture = reconstruct(changes.routing, self.head.prototypes)
        if self.only == "residual":
            return (z.to(mixture.dtype) - mixture).to(z.dtype)
        return move(mixture, self._rows(mixture), difference).to(z.dtype)

    def changes(self, z: Tensor, padding: Tensor | None = None) -> Changes:
        """Return what the edits change in states [N, d].

        Raises:
            InputError: a clamp that is undefined at a state that is not padding.
        """
        routing = self.head(z).routing
        count, chosen = self.head.num_prototypes, self.prototypes
        before = activations_of(routing.indices, routing.activations, chosen, count)
        reach = slice(None, GROUP_REACH)
        near = activations_of(
            routing.indices[:, reach], routing.activations[:, reach], chosen, count
        )
        after = before.clone()
        left = torch.zeros(len(z), dtype=torch.bool, device=z.device)
        capped = left.clone()
        for edit, members in self.edits:
            columns = torch.searchsorted(chosen, torch.tensor(members, device=chosen.device))
            if isinstance(edit, Clamp):
                held, undefined, full = self._hold(edit, z, padding)
                column = int(columns[0])
                after[:, column] = torch.where(undefined, after[:, column], held)
                left |= undefined
                capped |= full
            elif isinstance(edit, Group):
                own = after[:, columns]
                after[:, columns] = torch.where(
                    near[:, columns] > 0, own + edit.strength * own, own
                )
            else:
                factor = 0.0 if isinstance(edit, Ablate) else edit.factor
                after[:, columns] = factor * after[:, columns]
        return Changes(routing, before, after, left, capped)

    def _hold(
        self, edit: Clamp, z: Tensor, padding: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the clamped activation, where it is undefined, and where it met the cap, [N]."""
        weight = cast("Tensor", self.embedding.weight)
        # forward itself, not the module: its hooks would edit the logits that are to be unedited.
        logits = self.logit_map.before_softcap(self.embedding.forward(z).float())
        top, tokens = logits.max(-1)
        prototype = self.head.prototypes[edit.prototype]
        if edit.target == "signature":
            tokens = torch.full_like(tokens, self._signature_tokens[edit.prototype])
        rows = weight[tokens].float()
        if edit.measure == "evidence":
            top = top - logits.mean(-1)
            rows = rows - self._mean_row
        signature = self.logit_map.scale * (rows @ prototype)
        undefined = (signature <= 0) | (top <= 0)
        if edit.undefined == "error":
            refused = undefined if padding is None else undefined & ~padding
            if bool(refused.any()):
                raise self._refusal(edit, int(refused.nonzero()[0]), tokens, signature, top)
        cap = self._cap(edit, z)
        wanted = edit.fraction * top / torch.where(undefined, torch.ones_like(top), signature)
        return torch.minimum(wanted.clamp_min(0), cap), undefined, (wanted > cap) & ~undefined

    def _cap(self, edit: Clamp, z: Tensor) -> Tensor:
        """Return the largest activation that a clamp may hold, of each state or of all.

        k τ unless the edit says another, and with fitted weights ‖z‖ / ‖p‖: where the prototype is
        as long as the whole state.
        """
        if edit.cap is not None:
            return z.new_tensor(edit.cap, dtype=torch.float32)
        if self.head.weights == "cosine":
            return self.head.prototypes_per_token * self.head.scale.detach()
        return z.float().norm(dim=-1) / self.head.prototypes[edit.prototype].norm()

    def _refusal(
        self, edit: Clamp, state: int, tokens: Tensor, signature: Tensor, top: Tensor
    ) -> InputError:
        token = self.decode(int(tokens[state]))
        if float(signature[state]) <= 0:
            kind = "top token" if edit.target == "top" else "first token of its card"
            return InputError(
                f"prototype {edit.prototype} cannot be clamped here: its signature at the {kind} "
                f"{token!r} is {float(signature[state]):+.3g}, and no activation makes that a "
                "positive contribution. Clamp another prototype, take the target "
                f"{'signature' if edit.target == 'top' else 'top'}, or leave such positions as "
                "they are."
            )
        return InputError(
            f"prototype {edit.prototype} cannot be clamped here: the unedited top logit, of "
            f"{token!r}, is {float(top[state]):+.3g}, and a fraction of that is no positive "
            "contribution. Measure in evidence, or leave such positions as they are."
        )

    def _rows(self, like: Tensor) -> Tensor:
        rows = self.head.prototypes[self.prototypes]
        return rows.to(torch.promote_types(like.dtype, rows.dtype))


def plan_for(lm: OpenedModel, edits: Iterable[Edit], only: Only | None = None) -> Plan:
    """Check edits against an opened model, its head and its lens.

    Raises:
        InputError: what is not an edit, an unknown prototype, category or document, or edits that
            exclude one another.
    """
    head, tokenizer = lm.head, lm.tokenizer
    members: list[tuple[Edit, tuple[int, ...]]] = []
    for edit in edits:
        if not isinstance(edit, (Scale, Ablate, Clamp, Group)):
            raise InputError(
                f"{edit!r} is not an edit: expected prismlm.Scale, Ablate, Clamp or Group."
            )
        members.append((edit, tuple(members_of(edit, head.num_prototypes, lm.lens))))
    return Plan(
        output_embedding(lm.model),
        head,
        lm.logit_map,
        lambda token: token_alone(tokenizer, token),
        lambda prototype: signature_ids(lm, [prototype])[0][0],
        tuple(members),
        only,
    )
