"""The figures of a head on hidden states that are known."""

from collections.abc import Iterable

from torch import Tensor, nn

from prismlm.explain.prediction import OutputLayer
from prismlm.explain.quality import HeadQuality, QualitySums
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap


def measure_states(
    model: nn.Module, head: PrototypeHead, states: Iterable[tuple[Tensor, Tensor]]
) -> HeadQuality:
    """Measure a head on hidden states [N, d], each with the token that follows.

    The model is not run: its logits are those of its output embedding.
    """
    output = OutputLayer.from_model(model, LogitMap.of(model))
    sums, device = QualitySums(output, head), output.weight.device
    for z, targets in states:
        z = z.to(device).float()
        sums.add(z, output.logits(z), targets.to(device))
    return sums.result()
