"""The channels of prototype mixers: what they hold, and what interventions on them change."""

from prismlm.probes.channels.activations import read_channels
from prismlm.probes.channels.effects import effects_on, find_channels
from prismlm.probes.channels.report import ChannelReport, channel_report, measure_layers

__all__ = [
    "ChannelReport",
    "channel_report",
    "effects_on",
    "find_channels",
    "measure_layers",
    "read_channels",
]
