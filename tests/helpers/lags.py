"""Lags between writing and reading, layer by layer, of a model's gates along a text."""

from prismlm.models.decoders.mixers import chosen_layers, gates_of, mixers_of
from prismlm.probes.channels.metrics import LagTally


def read_write_lags(model, sequences, *, max_lag, shuffles, layers=None):
    """Return the cross-correlation of read and write of every channel, by layer."""
    mixers = mixers_of(model)
    tallies = {
        layer: LagTally(mixers[layer].channels, max_lag, shuffles)
        for layer in chosen_layers(len(mixers), layers)
    }
    for batch in sequences.batches():
        by_layer = gates_of(model, batch.input_ids, batch.attention_mask)
        for layer, tally in tallies.items():
            write, read = (gate.float().cpu() for gate in by_layer[layer])
            for row, owned in enumerate(batch.owned):
                tally.add(write[row, owned], read[row, owned])
    return {layer: tally.result() for layer, tally in tallies.items()}
