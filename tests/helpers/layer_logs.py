"""What a log of layers asks of a run, without one."""

from types import SimpleNamespace


def run_of(out, *, tokens=100, corpus_tokens=100):
    """Return what stands for a prepared run and its trainer; nothing is drawn."""
    recipe = SimpleNamespace(out=out, logging=SimpleNamespace(tensorboard=False))
    rows = SimpleNamespace(num_tokens=corpus_tokens)
    trainer = SimpleNamespace(meter=SimpleNamespace(tokens=tokens))
    return SimpleNamespace(recipe=recipe, rows=rows), trainer
