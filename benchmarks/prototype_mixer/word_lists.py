"""Make the word lists that ``prismlm eval pairs`` perturbs sentences by, from lists of others.

    python -m benchmarks.prototype_mixer.word_lists LISTS

LISTS is a directory with `us_uk_spelling.tsv` (American, British, source; VarCon and the translator
of hyperreality), `contractions_dict.json` (kootenpv/contractions), `oewn_lemma_senses.tsv` (lemma,
part of speech, synsets in order; Open English WordNet) and `abbreviations_textatistic.txt`
(Textatistic). What is kept of them is decided here and in `word_choices.toml`: common words, of one
meaning as far as can be told without reading the sentence. How common a word is, is counted in the
bundled sample of text.
"""

from __future__ import annotations

import csv
import json
import lzma
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.shared.options import script_options
from prismlm.corpus import sample_path
from prismlm.eval.perturbations.changes import WORDS_FILE
from prismlm.files import json_text

COMMON, SEEN = 8, 2
MOST_SENSES, LENGTH_APART = 5, 3
SCOWL_LEVEL = 60
VOWEL_CONSONANT = re.compile(r"[^aeiou][aeiou][bdgmnprt]")
CHOICES = tomllib.loads(Path(__file__).with_name("word_choices.toml").read_text(encoding="utf-8"))
IRREGULAR_PLURALS = dict(row.split("/") for row in CHOICES["irregular_plurals"].split())
IRREGULAR_VERBS = {
    row.split("/")[0]: row.split("/")[1:] for row in CHOICES["irregular_verbs"].split()
}
OTHER_MEANING = re.compile("|".join(CHOICES["other_meaning"].split()))
Senses = dict[str, dict[str, list[str]]]


def main() -> None:
    """Write the file that the package carries."""
    parser = script_options(__doc__)
    parser.add_argument("lists", type=Path)
    lists = parser.parse_args().lists
    words = make(lists, count_words())
    WORDS_FILE.write_bytes(lzma.compress(json_text(words, sort_keys=True).encode()))
    for name, found in words.items():
        print(f"{name}: {len(found):,}")
    print(f"wrote {WORDS_FILE}, {WORDS_FILE.stat().st_size:,} bytes")


def count_words() -> Counter[str]:
    """Return how often each word that is written small occurs in the bundled sample."""
    texts = pq.read_table(sample_path(), columns=["text"])["text"].to_pylist()
    return Counter(word for text in texts for word in re.findall(r"\b[a-z]+\b", text))


def make(lists: Path, count: Counter[str]) -> dict[str, Any]:
    """Return every list by its name."""
    senses: Senses = defaultdict(dict)
    for lemma, kind, found in _rows(lists / "oewn_lemma_senses.tsv"):
        senses[lemma]["a" if kind == "s" else kind] = found.split()
    spelling = _spelling(lists, count)
    return {
        "abbreviations": _abbreviations(lists),
        "contractions": _contractions(lists),
        "common": sorted(word for word, times in count.items() if times >= COMMON),
        "gender": [pair.split("/") for pair in CHOICES["gender"].split()],
        "plurals": _plurals(senses, count),
        "spelling": spelling,
        "synonyms": _synonyms(senses, count, {frozenset(pair) for pair in spelling}),
        "verbs": _verbs(senses, count),
    }


def _rows(path: Path) -> Iterator[list[str]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield line.rstrip("\n").split("\t")


def _chosen(name: str) -> set[str]:
    return set(CHOICES[name].split())


def _spelling(lists: Path, count: Counter[str]) -> list[list[str]]:
    british, american = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for us, uk, source in _rows(lists / "us_uk_spelling.tsv"):
        level = int(source[6:]) if source.startswith("varcon") else 0
        if level <= SCOWL_LEVEL and re.fullmatch("[a-z]{4,} [a-z]{4,}", f"{us} {uk}"):
            british[us].add(uk)
            american[uk].add(us)
    return sorted(
        [us, uk]
        for us, (uk, *more) in ((us, sorted(found)) for us, found in british.items())
        if not more and len(american[uk]) == 1 and us not in american and uk not in british
        and count[us] + count[uk] > 0 and not OTHER_MEANING.match(us)
    )  # fmt: skip


def _contractions(lists: Path) -> dict[str, str]:
    found = json.loads((lists / "contractions_dict.json").read_text(encoding="utf-8"))
    kept = {
        short: long
        for short, long in found.items()
        if re.fullmatch(r"[A-Za-z]+'[a-z]+|cannot", short)
        and short.lower() in _chosen("contracted")
    }
    return {short.lower() if short[0] != "I" else short: long for short, long in kept.items()}


def _abbreviations(lists: Path) -> list[list[str]]:
    """Return rows of long form, short form, and what has to stand beside it."""
    with (lists / "abbreviations_textatistic.txt").open(encoding="utf-8", newline="") as file:
        theirs = dict(csv.reader(file))
    taken = [row.split("|") for row in CHOICES["textatistic"].split()]
    ours = [row.split("|") for row in CHOICES["abbreviations"].strip("\n").splitlines()]
    return [[theirs[short], short, beside] for short, beside in taken] + ours


def _plurals(senses: Senses, count: Counter[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in sorted(senses):
        many = IRREGULAR_PLURALS.get(word, _with_s(word))
        if (
            re.fullmatch("[a-z]{3,}", word)
            and "n" in senses[word]
            and not senses[word].keys() & {"a", "r"}
            and count[word] >= COMMON
            and count[many] >= max(SEEN, 0.1 * count[word])
            and not word.endswith(("ing", "s"))
            and word not in _chosen("no_plural")
        ):
            found[word] = many
    return found


def _verbs(senses: Senses, count: Counter[str]) -> list[list[str]]:
    """Return rows of the plain form, the third person and the past of verbs."""
    rows = (_verb(word) for word in sorted(senses) if "v" in senses[word])
    return [
        [base, third, past]
        for base, third, past, _, _ in rows
        if count[base] >= SEEN and count[third] >= SEEN and count[past] >= SEEN
        and base != past and base not in _chosen("no_verb")
    ]  # fmt: skip


def _synonyms(
    senses: Senses, count: Counter[str], spelled: set[frozenset[str]]
) -> dict[str, list[str]]:
    """Return, for words in each of their forms, others of their first synset."""
    members = defaultdict[tuple[str, str], list[str]](list)
    for word, kinds in senses.items():
        # A word of several parts of speech cannot be told from the sentence by rules.
        ((kind, found),) = kinds.items() if len(kinds) == 1 else [("", [])]
        if found and len(found) <= MOST_SENSES and re.fullmatch("[a-z]{4,}", word):
            members[kind, found[0]].append(word)
    pairs = {
        (kind, one, other)
        for (kind, _), words in members.items()
        for one in words
        for other in words
        if one != other
        and not (kind in "an" and re.search("(ed|en|ing)( |$)", f"{one} {other}"))
        and frozenset((one, other)) not in spelled
        and not {one, other} & _chosen("no_synonym")
    }
    for line in CHOICES["synonyms"].strip().splitlines():
        kind, rest = line.split(": ")
        for one, other in (pair.split(">") for pair in rest.split()):
            if set(senses[one].get(kind, ())) & set(senses[other].get(kind, ())):
                pairs.add((kind, one, other))
            else:
                print(f"left out, of no synset in common: {one} {other}")
    found = defaultdict[str, set[str]](set)
    for kind, one, other in pairs:
        for word, instead in zip(_forms(kind, one), _forms(kind, other), strict=True):
            # "Beginnings" and "remains" are nouns as often.
            noun = word != one and kind == "v" and "n" in senses.get(word, ())
            near = not noun and abs(len(word) - len(instead)) <= LENGTH_APART
            if near and min(count[one], count[other]) >= COMMON and count[instead] >= SEEN:
                found[word].add(instead)
    return {word: sorted(instead) for word, instead in sorted(found.items())}


def _forms(kind: str, word: str) -> tuple[str, ...]:
    if kind == "n":
        return (word, IRREGULAR_PLURALS.get(word, _with_s(word)))
    return _verb(word) if kind == "v" else (word,)


def _with_s(word: str) -> str:
    if re.search("[^aeiou]y$", word):
        return f"{word[:-1]}ies"
    return f"{word}es" if re.search("(s|x|z|ch|sh)$", word) else f"{word}s"


def _verb(word: str) -> tuple[str, ...]:
    """Return the plain form, the third person, the past, the participle and the form in -ing."""
    stem = word
    if re.fullmatch(f".*{VOWEL_CONSONANT.pattern}", word) and (
        len(word) <= 4 or word in _chosen("doubled")
    ):
        stem = word + word[-1]
    past = re.sub("([^aeiou])ied$", r"\1ied", f"{word}d" if word.endswith("e") else f"{stem}ed")
    if re.search("[^aeiou]y$", word):
        past = f"{word[:-1]}ied"
    regular = (past, past)
    going = f"{word[:-1]}ing" if re.search("[^eoy]e$", word) else f"{stem}ing"
    return (word, _with_s(word), *IRREGULAR_VERBS.get(word, regular), going)


if __name__ == "__main__":
    main()
