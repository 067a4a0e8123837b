"""Reading the channels of prototype mixers, and intervening on them."""

from prismlm.probes.channels.concepts import find_channels
from prismlm.probes.channels.curves import read_channels
from prismlm.probes.channels.effects import effects_on
from prismlm.probes.channels.metrics import gate_uses
from prismlm.probes.channels.report import ChannelReport, ReportOptions, channel_report

__all__ = [
    "ChannelReport",
    "ReportOptions",
    "channel_report",
    "effects_on",
    "find_channels",
    "gate_uses",
    "read_channels",
]
