"""Where `explain` points for texts the model and the lens never read: domains.json.

    python -m benchmarks.attribution.domains MODEL
    python -m benchmarks.render domains

MODEL is the demo's. Texts are the first tokens of documents of the bundled sample that its corpus
does not have, as many of each domain. Asked is what a user asks: the shares by domain of the text
as it stands. Beside it, the same with every prediction alone, as if no text stood before it, and
what needs no model: which domains have the text's tokens, and the documents that BM25 finds.
Where a text turns to another matter, what stands before misleads: texts are also joined in pairs of
two domains, read as one, and asked for the second of the two.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

import prismlm
from benchmarks.attribution.retrieval import BM25
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus, sample_path
from prismlm.explain.attribution import attribute, carriers_of, joined
from prismlm.explain.trace import Trace
from prismlm.files import write_json

NEAREST, DIGITS, SEED = 10, 5, 0
TEXTS, TOKENS = 20, 128  # texts of each domain, and tokens of each text at most


def main() -> None:
    """Ask, and write what was found."""
    parser = script_options(__doc__, RESULTS / "domains.json")
    parser.add_argument("model", type=Path)
    args = parser.parse_args()
    lm = prismlm.load(args.model)
    corpus = lm.lens_for("domains").corpus
    assert corpus is not None, "the corpus of the lens is not where it was"
    names = sorted({name for name in corpus.column("domain") if name is not None})
    texts = beginnings(corpus, names)
    shares: dict[str, list[np.ndarray]] = {"explain": [], "alone": [], "tokens": [], "BM25": []}
    unattributed: list[float] = []
    of_token, words = domains_of_tokens(corpus, names), Words(corpus, names)
    for _, text in texts:
        trace = lm.explain(text)
        shares["explain"].append(shares_of(trace, names))
        shares["alone"].append(shares_of(trace, names, alone=True))
        unattributed.append(trace.sources(by="domain").unattributed)
        targets = lm.encode(text)[0, 1:].numpy()
        shares["tokens"].append(of_token[targets].mean(0))
        shares["BM25"].append(words.domains(text))
        print(f"{len(unattributed)} of {len(texts)} texts", flush=True)
    turned: dict[str, list[np.ndarray]] = {"explain": [], "alone": []}
    pairs = pairs_of([domain for domain, _ in texts])
    for first, second in pairs:
        before = texts[first][1] + "\n\n"
        trace = lm.explain(before + texts[second][1])[lm.encode(before).shape[1] :]
        turned["explain"].append(shares_of(trace, names))
        turned["alone"].append(shares_of(trace, names, alone=True))
        print(f"{len(turned['alone'])} of {len(pairs)} pairs", flush=True)
    result = {
        "environment": environment(),
        "model": {"parameters": sum(one.numel() for one in lm.model.parameters())},
        "corpus": {"documents": len(corpus), "tokens": corpus.num_tokens},
        "tokens": TOKENS,
        "domains": names,
        "own": [domain for domain, _ in texts],
        "unattributed": np.round(unattributed, DIGITS).tolist(),
        "shares": {name: np.round(rows, DIGITS).tolist() for name, rows in shares.items()},
        "turned": {
            "own": [texts[second][0] for _, second in pairs],
            "shares": {name: np.round(rows, DIGITS).tolist() for name, rows in turned.items()},
        },
    }
    write_json(args.out, result)


def beginnings(corpus: Corpus, names: list[str]) -> list[tuple[str, str]]:
    """Return domain and text of documents of the bundled sample that a corpus does not have."""
    table = pq.read_table(sample_path(), columns=["id", "domain", "text"])
    known, domains = set(corpus.doc_ids), np.array(table["domain"].to_pylist())
    ids, generator = table["id"].to_pylist(), np.random.default_rng(SEED)
    tokenizer, texts = corpus.tokenizer, list[tuple[str, str]]()
    for name in names:
        unread = [n for n in np.flatnonzero(domains == name).tolist() if ids[n] not in known]
        for n in generator.permutation(unread)[:TEXTS].tolist():
            whole = table["text"][n].as_py()
            read = tokenizer(whole, add_special_tokens=False)["input_ids"][:TOKENS]
            texts.append((name, str(tokenizer.decode(read))))
    return texts


def shares_of(trace: Trace, names: list[str], *, alone: bool = False) -> np.ndarray:
    """Return the share of each domain as ``explain`` gives it.

    ``alone``: with each prediction as if no text stood before it.
    """
    sources = trace.sources(by="domain")
    if alone:
        assert trace.lens is not None
        rows = (trace.predictions[t : t + 1] for t in trace.rows)
        each = [attribute(carriers_of(row, trace.lens), trace.lens) for row in rows]
        sources = joined(each).sources("domain")
    share = {one.key: one.share for one in sources.items}
    return np.array([share.get(name, 0.0) for name in names])


def pairs_of(domains: list[str]) -> list[tuple[int, int]]:
    """Draw another text, of another domain, to stand before each text: (before, text)."""
    generator = np.random.default_rng(SEED)
    every = np.array(domains)
    return [
        (int(generator.choice(np.flatnonzero(every != domain))), row)
        for row, domain in enumerate(domains)
    ]


def domains_of_tokens(corpus: Corpus, names: list[str]) -> np.ndarray:
    """Return the domains of each token's places, [V, domains], rows that sum to 1 or 0."""
    column = {name: place for place, name in enumerate(names)}
    # What has no domain is counted in a last column, which is left out.
    of = [column.get(name or "", len(names)) for name in corpus.column("domain")]
    owner = np.repeat(np.array(of), corpus.lengths)
    counts = np.zeros((len(corpus.tokenizer), len(names) + 1))
    np.add.at(counts, (corpus.tokens(0, corpus.num_tokens).astype(np.int64), owner), 1)
    counts = counts[:, :-1]
    return counts / counts.sum(1, keepdims=True).clip(1)


class Words:
    """The documents with a text's words, by domain."""

    def __init__(self, corpus: Corpus, names: list[str]) -> None:
        self._bm25 = BM25([corpus.text(n) for n in range(len(corpus))])
        domains = np.array(corpus.column("domain"))
        self._of = np.stack([domains == name for name in names], 1).astype(np.float64)

    def domains(self, text: str) -> np.ndarray:
        """Return the scores of the ten best documents, summed by domain."""
        scores = self._bm25.scores(text)
        best = np.argsort(-scores)[:NEAREST]
        return scores[best] @ self._of[best]


if __name__ == "__main__":
    main()
