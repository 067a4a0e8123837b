"""Documents that are left out on request: by language, by quality, and near-duplicates.

Quality and near-duplicates are those of datatrove (https://github.com/huggingface/datatrove), whose
other filters may stand before a part of a corpus as well (docs/corpus.md).
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prismlm.corpus.documents import Document
from prismlm.errors import InputError

if TYPE_CHECKING:
    from datatrove.data import Document as TroveDocument
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.word_tokenizers import WordTokenizer

NEAR_DUPLICATE = "near-duplicate"
# A word, a character of Chinese or Japanese, or punctuation.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+|[^\w\s]+")


@dataclass(frozen=True)
class Filters:
    """Which documents to leave out.

    Attributes:
        languages: keep only texts in these languages, such as ``en``, by py3langid.
        quality: leave out what Gopher's rules leave out, as in datatrove; the rule on English stop
            words applies unless ``languages`` has others.
        near_duplicates: of texts that are nearly equal, keep the first, by datatrove's MinHash.
    """

    languages: tuple[str, ...] = ()
    quality: bool = False
    near_duplicates: bool = False

    def check(self) -> None:
        """Raise InputError for a package that is not installed, or an unknown language."""
        needs = {"py3langid": self.languages, "datatrove": self.quality or self.near_duplicates}
        missing = [name for name, needed in needs.items() if needed and find_spec(name) is None]
        if missing:
            raise InputError(
                f"{' and '.join(missing)} is not installed: pip install 'prismlm[filters]'."
            )
        if self.languages:
            import py3langid

            known = sorted(name for name, _ in py3langid.rank("a"))
            if unknown := sorted({*self.languages} - {*known}):
                raise InputError(
                    f"unknown language {', '.join(unknown)}: expected one of {', '.join(known)}."
                )

    @cached_property
    def _gopher(self) -> Any:
        from datatrove.pipeline.filters import GopherQualityFilter

        is_english = not self.languages or "en" in self.languages
        words: Any = _words()
        return GopherQualityFilter(min_stop_words=2 if is_english else None, language=words)

    def reason(self, document: Document) -> str | None:
        """Return why to leave out a document by itself, or None."""
        if self.languages:
            import py3langid

            if (language := py3langid.classify(document.text)[0]) not in self.languages:
                return f"language {language}"
        if self.quality:
            passed = self._gopher.filter(to_datatrove(document))
            if passed is not True:
                return f"quality: {passed[1].removeprefix('gopher_').replace('_', ' ')}"
        return None


def to_datatrove(document: Document) -> TroveDocument:
    """Return the text of a document as datatrove passes it on."""
    from datatrove.data import Document as TroveDocument

    return TroveDocument(document.text, document.doc_id)


def _words() -> WordTokenizer:
    """Return a splitter into words for any language, without models."""
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Words(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return WORD.findall(text)

        def sent_tokenize(self, text: str) -> list[str]:
            raise NotImplementedError

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            raise NotImplementedError

    return Words()


class NearDuplicates(NamedTuple):
    """The steps of datatrove's MinHash, in a directory, over all texts of the input.

    Whether two texts are nearly equal does not depend on the number of parts.
    """

    directory: Path

    def sign(self, documents: Iterable[Document], rank: int) -> None:
        """Write the signatures of the documents of a part."""
        from datatrove.pipeline.dedup import MinhashDedupSignature

        words: Any = _words()
        step = MinhashDedupSignature(self._folder("signatures"), _config(), words)
        step.run(map(to_datatrove, documents), rank)

    def compare(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Find pairs with equal signatures: one of :meth:`buckets` tasks."""
        from datatrove.pipeline.dedup import MinhashDedupBuckets

        folders = self._folder("signatures"), self._folder("pairs")
        MinhashDedupBuckets(*folders, config=_config()).run(None, rank, world_size)

    def buckets(self) -> int:
        """Return the number of tasks of :meth:`compare`."""
        return _config().num_buckets

    def cluster(self) -> None:
        """Join pairs to clusters, in one process; texts are not read."""
        from datatrove.pipeline.dedup import MinhashDedupCluster

        folders = self._folder("pairs"), self._folder("clusters")
        # tqdm draws a bar of its own.
        with redirect_stderr(io.StringIO()):
            MinhashDedupCluster(*folders, _config(), save_cluster_id=True).run(None, 0, 1)
        most = -1
        for path in sorted((self.directory / "clusters").glob("*.clusters")):
            rows = np.fromfile(path, "<u4").reshape(-1, 2).astype(np.int64)
            # Clusters are numbered by their first documents, so each first one has a new number.
            before = np.maximum.accumulate(np.concatenate([[most], rows[:, 1]]))
            np.save(self._removed(int(path.stem)), rows[rows[:, 1] <= before[:-1], 0])
            most = int(before[-1])

    def of_part(self, rank: int) -> set[int]:
        """Return which documents of a part to leave out, in the order in which they were signed."""
        path = self._removed(rank)
        return set(np.load(path).tolist()) if path.is_file() else set()

    def _removed(self, rank: int) -> Path:
        return self.directory / f"removed-{rank:05d}.npy"

    def _folder(self, name: str) -> str:
        return str(self.directory / name)


def _config() -> MinhashConfig:
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.hashing import HashConfig
    from loguru import logger

    logger.disable("datatrove")
    # Version 4 of xxhash, datatrove's default, refuses what datatrove gives it.
    return MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))
