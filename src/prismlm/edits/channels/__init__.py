"""Interventions on the channels of prototype mixers, as values and in their scope."""
