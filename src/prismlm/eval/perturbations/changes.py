"""Changes of a sentence: perturbations that keep its meaning, and interventions that do not.

A change takes a sentence and a random generator, and returns None where it does not apply.
``words/ATTRIBUTION.md`` credits the sources of the word lists.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Container, Sequence
from functools import cache
from pathlib import Path
from typing import Any

WORDS_FILE = Path(__file__).parent / "words" / "words.json.xz"


@cache
def _word_lists() -> dict[str, Any]:
    lists = json.loads(lzma.decompress(WORDS_FILE.read_bytes()))
    for name in ("spelling", "gender"):
        lists[name] = dict(lists[name]) | {second: first for first, second in lists[name]}
    return lists | {"common": frozenset(lists["common"])}


def word_list(name: str) -> Any:
    """Return one of the word lists.

    ``spelling``: American to British forms and the reverse; ``synonyms`` of each inflected word;
    ``plurals`` of countable nouns; ``contractions``: short to long forms; ``abbreviations``: long
    form, short form and the context of the form; ``gender``: words of one gender to the other and
    the reverse; ``common``: frequent words.
    """
    return _word_lists()[name]


def match_case(word: str, like: str) -> str:
    """Return a word with the capitals of another."""
    if len(like) > 1 and like.isupper():
        return word.upper()
    return word[:1].upper() + word[1:] if like[:1].isupper() else word


def replace_match(sentence: str, match: re.Match[str], other: str, group: str | int = 0) -> str:
    """Return a sentence with a match, or a group of it, replaced."""
    return sentence[: match.start(group)] + other + sentence[match.end(group) :]


def alternatives(expressions: Sequence[str]) -> str:
    """Return a pattern that matches any of some words, the longest first."""
    return "|".join(map(re.escape, sorted(expressions, key=lambda word: (-len(word), word))))


def replace_word(sentence: str, match: re.Match[str], other: str) -> str | None:
    """Return a sentence with a match replaced, or None where "a" and "an" would be wrong."""
    before = sentence[: match.start()].rsplit(" ", 2)[-2:]
    article = before[0].lower() if len(before) == 2 and not before[1] else ""
    vowels = tuple("aeiouAEIOU")
    if article in ("a", "an") and match[0].startswith(vowels) != other.startswith(vowels):
        return None
    return replace_match(sentence, match, other)


MAX_SYNONYMS = 3
WORD = re.compile(r"(?<![\w'-])[A-Za-z]+(?![\w'-])")
PREPOSITIONS = (
    "in|on|at|of|to|from|for|with|by|about|into|over|under|through|between|against|during|without"
    "|after|before|behind|near|across|around|toward|towards|inside|within"
)
# What may follow a noun that is not part of a compound.
NOUN_END = rf"(?=[.,;!?]| (?:{PREPOSITIONS}|and|or|but|when|where|while|because|as)\b)"
DETERMINERS = "the|my|your|his|her|our|their|its"


def synonym(sentence: str, draw: random.Random) -> str | None:
    """Replace one to three words by synonyms of their first sense."""
    synonyms = word_list("synonyms")
    matches = _listed_words(sentence, synonyms)
    if not matches:
        return None
    # Few sentences have two or three listed words; most of those change all of them.
    many = min(len(matches), MAX_SYNONYMS if draw.random() < 0.75 else 1)
    chosen = sorted(draw.sample(matches, many), key=lambda word: -word.start())
    text: str | None = sentence
    for word in chosen:
        other = match_case(draw.choice(synonyms[word[0].lower()]), word[0])
        text = replace_word(text, word, other)
        if text is None:
            return None
    return text


def spelling(sentence: str, draw: random.Random) -> str | None:
    """Change one word between American and British spelling."""
    matches = _listed_words(sentence, word_list("spelling"))
    if not matches:
        return None
    word = draw.choice(matches)
    other = word_list("spelling")[word[0].lower()]
    return replace_word(sentence, word, match_case(other, word[0]))


def _listed_words(sentence: str, lists: Container[str]) -> list[re.Match[str]]:
    """Return the listed words, without names such as Labor Day."""
    return [
        word
        for word in WORD.finditer(sentence)
        if word[0].lower() in lists and (word[0].islower() or not word.start())
    ]


def morphology(sentence: str, draw: random.Random) -> str | None:
    """Change the number of one noun after a preposition and an article or possessive.

    No other word depends on the number of such a noun.
    """
    pattern, forms = _nouns()
    matches = list(pattern.finditer(sentence))
    if not matches:
        return None
    word = draw.choice(matches)
    return replace_match(sentence, word, forms[word["form"]], "form")


@cache
def _nouns() -> tuple[re.Pattern[str], dict[str, str]]:
    """Return a pattern of such nouns, and the other form of each."""
    plurals = word_list("plurals")
    forms = plurals | {many: one for one, many in plurals.items()}
    nouns = rf"(?P<form>{alternatives([*forms])}){NOUN_END}"
    return re.compile(rf"\b(?:{PREPOSITIONS}) (?:{DETERMINERS}) {nouns}"), forms


KEYS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
# "General" is not a title in these.
NO_NAME = (
    "Motors|Electric|Mills|Assembly|Secretary|Manager|League|Counsel|Council|Hospital|Dynamics"
)
TITLES = ("Attorney", "Brigadier", "Major", "Lieutenant", "Secretary", "Vice")
NO_TITLE = "".join(rf"(?<!\b{title} )" for title in TITLES)


def keyboard_neighbours(letter: str) -> str:
    """Return the letters beside a letter in its row of a QWERTY keyboard."""
    (row,) = (keys for keys in KEYS if letter in keys)
    place = row.index(letter)
    return row[max(0, place - 1) : place] + row[place + 1 : place + 2]


def typo(sentence: str, draw: random.Random) -> str | None:
    """Replace an inner letter of one word by its neighbour on the keyboard.

    The result must not be a word.
    """
    matches = list(re.finditer(r"(?<![\w'-])[a-z]{4,}(?![\w'-])", sentence))
    if not matches:
        return None
    word = draw.choice(matches)
    place = draw.randrange(1, len(word[0]) - 1)
    letter = draw.choice(keyboard_neighbours(word[0][place]))
    misspelled = word[0][:place] + letter + word[0][place + 1 :]
    known = misspelled in word_list("common")
    return None if known else replace_match(sentence, word, misspelled)


def contraction(sentence: str, draw: random.Random) -> str | None:
    """Contract one pair of words, such as "do not", or expand one contraction."""
    pattern, forms = _contractions()
    matches = list(pattern.finditer(sentence))
    # "Don't you know?" cannot be expanded.
    if not matches or sentence.endswith("?"):
        return None
    word = draw.choice(matches)
    form = word[0] if word[0] in forms else word[0][:1].lower() + word[0][1:]
    return (
        replace_match(sentence, word, match_case(forms[form], word[0])) if form in forms else None
    )


@cache
def _contractions() -> tuple[re.Pattern[str], dict[str, str]]:
    """Return a pattern of unambiguous contractions and their long forms, and the other of each."""
    unambiguous = ("n't", "'m", "'re", "'ll")
    pairs = [pair for pair in word_list("contractions").items() if pair[0].endswith(unambiguous)]
    forms = dict(pairs) | {long: short for short, long in pairs}
    return re.compile(rf"\b(?i:{alternatives([*forms])})\b(?= [a-z])"), forms


def punctuation(sentence: str, draw: random.Random) -> str | None:
    """Add or remove one punctuation mark or one capital; the words do not change."""
    texts: list[str] = []
    if sentence.endswith("."):
        texts.append(sentence[:-1])
    for joint in re.finditer(r"(?<=[a-z]),? (?=(and|but|or|because|when|while|which) )", sentence):
        instead = " " if joint[0].startswith(",") else ", "
        texts.append(sentence[: joint.start()] + instead + sentence[joint.end() :])
    opening = re.match(r"(\w+)( \w+)?( \w+)?,", sentence)
    if opening:
        texts.append(sentence[: opening.end() - 1] + sentence[opening.end() :])
    first = re.match(r"[A-Z][a-z]+\b", sentence)
    if first and first[0].lower() in word_list("common"):
        texts.append(sentence[0].lower() + sentence[1:])
    inner = list(re.finditer(r"(?<= )[a-z]{4,}\b", sentence))
    if inner:
        at = draw.choice(inner).start()
        texts.append(sentence[:at] + sentence[at].upper() + sentence[at + 1 :])
    return draw.choice(texts) if texts else None


def abbreviation(sentence: str, draw: random.Random) -> str | None:
    """Abbreviate one word or name, or expand an abbreviation."""
    matches = [
        (word, instead)
        for pattern, instead in _abbreviations()
        for word in pattern.finditer(sentence)
    ]
    if not matches:
        return None
    word, instead = draw.choice(matches)
    if not word.start():
        instead = instead[0].upper() + instead[1:]
    text = replace_word(sentence, word, instead)
    if text is None:
        return None
    # One full stop ends both the short form and the sentence.
    text = re.sub(r"\.\.$", ".", text)
    return text if text[-1] in ".?!" else f"{text}."


@cache
def _abbreviations() -> list[tuple[re.Pattern[str], str]]:
    """Return patterns and their replacements."""
    rows: list[tuple[re.Pattern[str], str]] = []
    expanded: set[tuple[str, str]] = set()
    for long, short, context in word_list("abbreviations"):
        pattern = _in_context(re.escape(long) + r"\b", "" if context == "the" else context)
        rows.append((pattern, short))
        if context not in ("one way", "day") and (short, context) not in expanded:
            expanded.add((short, context))
            end = "" if short[-1] in ".%" else r"\b"
            rows.append((_in_context(re.escape(short) + end, context), long))
    return rows


def _in_context(form: str, context: str) -> re.Pattern[str]:
    start = "" if form.startswith("%") or form.startswith("\\ ") else r"(?<![\w-])"
    return re.compile(
        {
            "the": rf"(?<=\b[Tt]he ){form}(?![\w'-]| [a-z]+[^a-z .,]| [A-Z\d])",
            "Name": rf"{NO_TITLE}{start}{form}(?= (?!{NO_NAME})[A-Z][a-z])",
            "after": rf"(?<=[a-z] )(?<! the ){start}{form}(?! [A-Z]|')",
            "number": rf"{start}{form}(?= \d)",
            "count": rf"(?<=\d){form}(?!\w| [A-Z])",
            "date": rf"{start}{form}(?= \d)",
            "day": rf"(?<![A-Z]\w\w )(?<![a-z]-){start}{form}(?! [A-Z]|'|-)",
        }.get(context, rf"{start}{form}(?![\w'-]| [A-Z\d])")
    )


# Words with several counterparts; those of "his" and "her" depend on the context.
PRONOUN_GENDER = {
    "Mrs.": "Mr.",
    "Miss": "Mr.",
    "his": "her",
    "him": "her",
    "hers": "his",
    "her": "his",
}
# A word with a capital, other than the first, "I" and what follows a form of address.
NAME = re.compile(r"(?<=[^.?!] )(?<!Mr\. )(?<!Ms\. )(?<!Mrs\. )(?!I\b|Mr\.|Ms\.|Mrs\.)[A-Z]")
# After these, "her" was an object.
AFTER_OBJECT = re.compile(
    rf"[.,;!?]|$| (?:{PREPOSITIONS}|and|or|but|that|a|an|the|as|if|when|how|what|because|up|out|off"
    r"|down|again|so|more|not|is|was|will|all|there|here|some|any|every|very|too|back|away|alone|now"
    r"|yesterday|today|tomorrow|then|i|you|(?!famil|on|ear|love|dai|elder|friend|ug|lone)\w+ly|he"
    r"|she|it|we|they|my|your|his|their)\b",
    re.IGNORECASE,
)
# After these, "her" is ambiguous: told her stories, told her to go.
DITRANSITIVE = re.compile(
    r"\b(tell|told|give|gave|given|ask|asked|let|make|made|help|helped|see|saw|show|showed|offer"
    r"|offered|send|sent|buy|bought|call|called|hear|heard|watch|got)\W*$"
)
INSERTED = re.compile(
    r"(?<=[a-zI] )(?:(?:is|are|was|were|am|will|would|can|could|should)(?= [a-z])"
    r"(?! (?:to|had)\b)|(?:has|have|had)"
    r"(?= (?:been|become|taken|made|gone|seen|come|done|begun|\w+ed)\b))"
)
REMOVED = re.compile(
    r"\b(?:(?i:(?P<plain>is|are|was|were|would|could|should|must|does|do|did|has|have|had|am|will)"
    r"(?:n't| not))|(?P<odd>[Cc]an't|[Cc]annot|[Ww]on't))(?= [a-z])"
    r"(?! (?:only|just|i|you|he|she|it|we|they)\b)"
)
# A sentence with these is negative already, or odd once negated.
NEGATIVE = re.compile(
    r"\b(no|not|never|nothing|nobody|none|neither|nor|hardly|cannot|without|any\w*|yet|either|ever"
    r"|at all|until|before|unless|much|only|also|too|still|already|some\w*|few|little"
    r"|whether)\b|n't",
    re.IGNORECASE,
)
COUNTS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve")
COUNT_BEFORE_NOUN = re.compile(
    rf"(?<=[a-z] )(?:{alternatives(COUNTS)}|[2-9]\d?)(?= [a-z]+s\b)(?! (?:and|th)\b)"
)
VERBS = {"is": "are", "was": "were", "has": "have", "does": "do"}
SINGULAR = {"this": "these", "a": "two", "an": "two"}
PLURAL = {"these": "this", "several": "one", "many": "one"}
# After these, the number of a noun depends on another word.
PREDICATE = re.compile(
    r"\b(is|are|was|were|be|been|being|am|become|becomes|became|such|all|both|what|quite|half|once|times|as|"
    r"like|not|of|per|remain\w*|how|too|so|[a-z]+'[a-z]+)$",
    re.IGNORECASE,
)


def gender(sentence: str, draw: random.Random) -> str | None:
    """Swap the gender of every pronoun, noun and form of address in a sentence without names."""
    first = sentence.split()[0].lower().strip(",'")
    if NAME.search(sentence) or first not in word_list("common"):
        return None
    swapped = word_list("gender") | PRONOUN_GENDER
    matches = [
        word
        for word in re.finditer(r"(?<![\w'-])(?:Mr\.|Ms\.|Mrs\.|[A-Za-z]+(?![\w-]))", sentence)
        # A capital inside a sentence, as in "King", is part of a name.
        if word[0] in swapped or (word[0].lower() in swapped and not word.start())
    ]
    text = sentence
    for word in reversed(matches):
        key = word[0] if word[0] in swapped else word[0].lower()
        rest, other = sentence[word.end() :], swapped[key]
        if key == "her" and word.start() and AFTER_OBJECT.match(rest):
            other = "him"
        elif key == "her" and DITRANSITIVE.search(sentence[: word.start()]):
            return None
        elif key == "his" and re.match(r"[.,;!?]| (?:and|or|but)\b", rest):
            other = "hers"
        text = text[: word.start()] + match_case(other, word[0]) + text[word.end() :]
    # "Sons and daughters" only changes places.
    unchanged = sorted(text.lower()) == sorted(sentence.lower())
    return None if unchanged else text


def negation(sentence: str, draw: random.Random) -> str | None:
    """Negate the first auxiliary, or remove its "not"."""
    removed = REMOVED.search(sentence)
    match = removed or INSERTED.search(sentence)
    rest = sentence.replace(removed[0], "", 1) if removed else sentence
    if not match or sentence.endswith("?") or NEGATIVE.search(rest):
        return None
    if removed:
        positive = removed["plain"] or ("will" if removed[0].lower() == "won't" else "can")
        other = match_case(positive, removed[0])
    else:
        other = "cannot" if match[0] == "can" else f"{match[0]} not"
    return replace_match(sentence, match, other)


def number(sentence: str, draw: random.Random) -> str | None:
    """Change singular to plural or the reverse, with the verb that follows; or change a count."""
    changes = [_recounted(sentence, word, draw) for word in COUNT_BEFORE_NOUN.finditer(sentence)]
    changes += [_renumbered(sentence, word) for word in _numbered().finditer(sentence)]
    matches = [change for change in changes if change is not None]
    return draw.choice(matches) if matches else None


def _recounted(sentence: str, word: re.Match[str], draw: random.Random) -> str:
    digits = [str(count) for count in (range(2, 10) if len(word[0]) == 1 else range(10, 100))]
    counts = digits if word[0].isdecimal() else COUNTS
    other = draw.choice([count for count in counts if count != word[0]])
    return replace_match(sentence, word, other)


@cache
def _numbered() -> re.Pattern[str]:
    plurals = word_list("plurals")
    one, many = alternatives([*plurals]), alternatives([*plurals.values()])
    verbs = alternatives([*VERBS, *VERBS.values()])
    return re.compile(
        rf"(?P<before>[\w']+,? )?\b(?P<noun>([Tt]his|[Aa]n?) ({one})"
        rf"|([Tt]hese|[Ss]everal|[Mm]any) ({many}))"
        rf"(?:(?= (?P<verb>{verbs}) )|{NOUN_END}(?! (?:and|or)\b))"
    )


def _renumbered(sentence: str, word: re.Match[str]) -> str | None:
    before, (count, noun), verb = (word["before"] or "").strip(), word["noun"].split(), word["verb"]
    plurals, counts, verbs = word_list("plurals"), SINGULAR, VERBS
    if count.lower() in PLURAL:
        plurals, verbs = ({b: a for a, b in forms.items()} for forms in (plurals, VERBS))
        counts = PLURAL
    # At the beginning of a clause it is the subject, whose verb may be anywhere.
    subject = not verb and (not before or before.endswith(","))
    within = verb and re.fullmatch(PREPOSITIONS, before)
    if subject or within or PREDICATE.search(before) or (verb and verb not in verbs):
        return None
    start, end = word.span("noun")
    other = f"{match_case(counts[count.lower()], count)} {plurals[noun]}"
    rest = sentence[end:] if not verb else f" {verbs[verb]}{sentence[word.end('verb') :]}"
    return sentence[:start] + other + rest
