"""What the channels of trained ProtoTs hold: ten unselected, and concepts put to the test.

    python -m benchmarks.prototype_mixer.channels MODEL [MODEL …] --corpus DIR

Several models are seeds of one recipe. Ten channels of the first are drawn by a seed. Concepts are
proposed by the write gate on the training split; then words of theirs that come again in held-out
text are predicted with and without the channel, beside channels drawn as controls from its layer.
Writes docs/results/channels.json; `python -m benchmarks.render channels` makes
the page of it.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.prototype_mixer.channel_concepts import (
    TESTED,
    Loaded,
    Settings,
    choose_concepts,
    overall,
    put_to_the_test,
    words_in,
)
from benchmarks.prototype_mixer.proposed_concepts import token_gates
from benchmarks.prototype_mixer.unselected_channels import described, lags, locality, unselected
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.cli.progress import ConsoleReporter
from prismlm.corpus import Corpus
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.corpus.windows import Sequences
from prismlm.files import write_json
from prismlm.models.checkpoint import read_checkpoint
from prismlm.probes.channels.activations import read_activations
from prismlm.probes.channels.report import measure_layers


def main() -> None:
    """Measure and write."""
    parser = script_options(__doc__, RESULTS / "channels.json")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--concepts", type=int, default=6)
    parser.add_argument("--words", type=int, default=4, help="of each concept")
    parser.add_argument("--controls", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-tokens", type=int, default=1_000_000, help="0 for all")
    parser.add_argument("--heldout-tokens", type=int, default=0, help="0 for all")
    parser.add_argument("--lag-tokens", type=int, default=20_000)
    parser.add_argument("--least", type=int, default=100, help="occurrences of a word")
    parser.add_argument("--common", type=int, default=100, help="most frequent tokens left out")
    parser.add_argument("--minimum-cases", type=int, default=10)
    parser.add_argument("--minimum-probability", type=float, default=0.01)
    given = parser.parse_args()
    corpus = Corpus.open(given.corpus)
    named: dict[str, Any] = {field.name: getattr(given, field.name) for field in fields(Settings)}
    for name in ("train_tokens", "heldout_tokens"):
        named[name] = named[name] or None
    settings = Settings(**named)
    models: list[Loaded] = []
    for path in given.models:
        model, tokenizer = read_checkpoint(path)
        check_tokenizer_of(corpus, tokenizer, Path(path).name)
        models.append(Loaded(path.resolve().name, model, tokenizer))
    write_json(given.out, study(models, corpus, settings))
    print(f"wrote {given.out}")


def study(models: list[Loaded], corpus: Corpus, settings: Settings) -> dict[str, Any]:
    """Return everything that the page shows."""
    first = models[0]
    train = Sequences(corpus, "train", max_tokens=settings.train_tokens)
    heldout = Sequences(corpus, "heldout", max_tokens=settings.heldout_tokens)
    reading = {"total": train.tokens, "progress": ConsoleReporter()}
    read = read_activations(first.model, train.batches(), ("write",), **reading)
    gates = token_gates(read, first.model.config.vocab_size)
    concepts, passed_over, cases = choose_concepts(first, gates, heldout, settings)
    tested = [
        put_to_the_test(first, concept, cases[concept.name], settings) for concept in concepts
    ]
    return {
        "environment": environment(),
        "settings": asdict(settings) | {"corpus": corpus.name, "tested": TESTED},
        "model": described(first),
        "channels": unselected(first, gates, settings.seed),
        "concepts": tested,
        "overall": overall(tested, settings.controls),
        "passed_over": passed_over,
        "models": [words_in(loaded, concepts, train, heldout, settings) for loaded in models],
        "locality": locality(first, heldout),
        "measures": {
            kind: list(measure_layers(first.model, heldout, kind)) for kind in ("write", "read")
        },
        "lags": lags(first, corpus, settings),
    }


if __name__ == "__main__":
    main()
