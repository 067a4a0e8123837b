"""Contributions of channels and tokens to a linear function of a prototype mixer's output."""

from prismlm.ops.channel_parts.matrix import ChannelFlow, channel_parts, token_parts

__all__ = ["ChannelFlow", "channel_parts", "token_parts"]
