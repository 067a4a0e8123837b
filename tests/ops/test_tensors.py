"""Arguments that do not fit together are refused, where PyTorch would repeat or truncate them."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.ops.channel_parts import ChannelFlow, channel_parts
from prismlm.ops.delta_rule import delta_rule
from prismlm.ops.prototype_head import route
from prismlm.ops.prototype_mixer import PrefixState, prefix_mean
from prismlm.ops.signal_noise_attention import attend

pytestmark = pytest.mark.usefixtures("unchecked")


def ones(*shape):
    return torch.ones(shape)


GATES, HEADS = ones(2, 6, 3), ones(2, 6, 3, 4)
MEAN = {"write": GATES, "read": GATES, "values": ones(2, 6, 4), "decay": ones(3) / 2}
RULE = {"queries": HEADS, "keys": HEADS, "values": HEADS, "rates": GATES}
ATTENTION = {"u_signal": HEADS, "u_noise": HEADS, "noise_weight": 0.1, "frequencies": ones(2, 2)}
ROUTE = {"z": ones(5, 4), "prototypes": ones(7, 4), "k": 2, "scale": 1.0}
FLOW = ChannelFlow(GATES[0], GATES[0], -GATES[0], ones(6, 4), ones(6, 4), ones(1, 4))
PARTS = {"flow": FLOW, "position": 3, "directions": ones(1, 4)}


@pytest.mark.parametrize(
    ("function", "arguments", "changes"),
    [
        (prefix_mean, MEAN, {"read": GATES[:, :1]}),
        (prefix_mean, MEAN, {"decay": ones(1)}),
        (prefix_mean, MEAN, {"state": PrefixState(ones(1, 3, 4), ones(1, 3))}),
        (prefix_mean, MEAN, {"mask": ones(2, 6)}),
        (delta_rule, RULE, {"values": HEADS[:, :, :1]}),
        (delta_rule, RULE, {"mask": ones(2, 6).long()}),
        (attend, ATTENTION, {"positions": torch.zeros(1, 1, dtype=torch.int64)}),
        (route, ROUTE, {"mask": ones(1).bool()}),
        (route, ROUTE, {"k": 8}),
        (channel_parts, PARTS, {"position": -1}),
        (channel_parts, PARTS, {"directions": ones(1, 1)}),
    ],
)
def test_what_does_not_fit_is_refused(function, arguments, changes):
    with pytest.raises(InputError, match=r"expected"):
        function(**arguments | changes)
