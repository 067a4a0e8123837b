"""One forward pass, watched: what embedding, mixers and SwiGLUs add to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from prismlm.errors import InputError
from prismlm.explain.direct_path import DirectPath
from prismlm.layers import PrototypeHead, PrototypeMixer
from prismlm.models.decoders.recurrent_decoder import RecurrentBlock, RecurrentModel
from prismlm.models.positions import check_sequence
from prismlm.models.seam import capture
from prismlm.models.watch import Hook, watch
from prismlm.ops.channel_parts import ChannelFlow


class MixerDecoder(NamedTuple):
    """The modules of a decoder of prototype mixers that the residual stream is read from.

    Attributes:
        blocks: its layers, first to last.
        mixers: theirs.
        norm: the last one.
    """

    blocks: tuple[RecurrentBlock, ...]
    mixers: tuple[PrototypeMixer, ...]
    norm: nn.RMSNorm


def mixer_decoder_of(model: nn.Module) -> MixerDecoder | None:
    """Return the decoder in a model, or None unless all of its layers have prototype mixers."""
    decoder = next((part for part in model.modules() if isinstance(part, RecurrentModel)), None)
    if decoder is None:
        return None
    blocks = tuple(block for block in decoder.layers if isinstance(block, RecurrentBlock))
    mixers = tuple(block.mixer for block in blocks if isinstance(block.mixer, PrototypeMixer))
    whole = mixers and len(mixers) == len(decoder.layers)
    norm = decoder.norm
    return MixerDecoder(blocks, mixers, norm) if whole and isinstance(norm, nn.RMSNorm) else None


@torch.no_grad()
def read_direct_path(
    model: nn.Module, head: PrototypeHead, input_ids: Int64[Tensor, " T"]
) -> DirectPath:
    """Run a model once over one sequence, and keep what its last hidden states are the sum of.

    Edits and interventions that hold are seen. What is kept grows with T, and not with T².

    Raises:
        InputError: the model has no prototype mixers, or not one sequence of tokens.
    """
    decoder = mixer_decoder_of(model)
    if decoder is None:
        raise InputError(
            f"{type(model).__name__} is no decoder of prototype mixers, so there are no channels "
            "to split its states over."
        )
    check_sequence(input_ids)
    with _watching(decoder) as seen, capture(model, logits=False) as captured:
        model(input_ids=input_ids[None], use_cache=False)
    return DirectPath(
        head=head,
        embedding=_kept(seen["embedding", 0]),
        mlps=tuple(_kept(seen["mlp", layer]) for layer in range(len(decoder.blocks))),
        flows=tuple(
            _on_cpu(mixer.flow(seen["inputs", layer], seen["gates", layer]))
            for layer, mixer in enumerate(decoder.mixers)
        ),
        first_decays=tuple(
            mixer.decay_of(seen["inputs", layer][:, :1]).expand(1, 1, -1)[0, 0].cpu()
            for layer, mixer in enumerate(decoder.mixers)
        ),
        outputs=tuple(mixer.output_map.detach().cpu() for mixer in decoder.mixers),
        hidden=_kept(seen["hidden", 0]),
        normed=_kept(seen["normed", 0]),
        states=_kept(captured.z),
        gain=decoder.norm.weight.detach().cpu(),
        epsilon=decoder.norm.eps or 0.0,
    )


@contextmanager
def _watching(decoder: MixerDecoder) -> Iterator[dict[tuple[str, int], Any]]:
    """Note what this thread's passes through a decoder add to the residual stream, by layer."""
    seen: dict[tuple[str, int], Any] = {}

    def note(name: str, layer: int = 0) -> Callable[..., None]:
        """Note the first input of a module, or its output where it has one by now."""

        def hook(module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
            seen[name, layer] = (*output, args[0])[0]

        return hook

    hooks = [
        Hook(decoder.blocks[0], before=note("embedding")),
        Hook(decoder.norm, before=note("hidden"), after=note("normed")),
    ]
    for layer, (block, mixer) in enumerate(zip(decoder.blocks, decoder.mixers, strict=True)):
        hooks += [
            Hook(mixer, before=note("inputs", layer)),
            Hook(mixer.gates, after=note("gates", layer)),
            Hook(block.mlp, after=note("mlp", layer)),
        ]
    with watch(hooks):
        yield seen


def _on_cpu(flow: ChannelFlow) -> ChannelFlow:
    parts = flow._asdict().items()
    return flow._replace(**{name: x.detach().cpu() for name, x in parts if isinstance(x, Tensor)})


def _kept(tensor: Tensor) -> Tensor:
    """Return the one sequence of a batch of one, on the CPU."""
    return tensor[0].detach().cpu()
