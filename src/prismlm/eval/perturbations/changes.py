"""Changes of a sentence: its word lists, changes that keep its meaning, and flips of it.

``words/ATTRIBUTION.md`` credits the sources of the lists, ``benchmarks/prototype_mixer/
word_lists.py`` makes the file. A change takes a sentence and a random generator; None where it
does not apply.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

WORDS_FILE = Path(__file__).parent / "words" / "words.json.xz"


@dataclass(frozen=True)
class Words:
    """The lists.

    Attributes:
        spelling: American and British forms of words, either way.
        synonyms: words, in each of their forms, and what can stand for them.
        plurals: nouns that are counted, and their plurals.
        verbs: plain form, third person and past.
        contractions: short and long forms, such as don't and do not.
        abbreviations: long form, short form, and what stands beside it.
        gender: words of one gender and of the other.
        common: words that are not rare in text.
    """

    spelling: dict[str, str]
    synonyms: dict[str, list[str]]
    plurals: dict[str, str]
    verbs: list[list[str]]
    contractions: dict[str, str]
    abbreviations: list[list[str]]
    gender: dict[str, str]
    common: frozenset[str]


@cache
def words() -> Words:
    """Return the lists, which are read once."""
    found = json.loads(lzma.decompress(WORDS_FILE.read_bytes()))
    for name in ("spelling", "gender"):
        found[name] = dict(found[name]) | {other: one for one, other in found[name]}
    return Words(**found | {"common": frozenset(found["common"])})


class Change(NamedTuple):
    """A sentence that was changed.

    ``by`` is the word or rule that changed it, so that no word fills a slice, and empty for any;
    ``spare`` ones are used only where others run out.
    """

    text: str
    by: str
    spare: bool = False


def cased(word: str, like: str) -> str:
    """Return a word that begins with a capital, or is all capitals, as another does."""
    if len(like) > 1 and like.isupper():
        return word.upper()
    return word[:1].upper() + word[1:] if like[:1].isupper() else word


def put(sentence: str, found: re.Match[str], other: str, by: str) -> Change:
    """Return a sentence with a word in the place of a match."""
    return Change(sentence[: found.start()] + other + sentence[found.end() :], by)


def any_of(expressions: Sequence[str]) -> str:
    """Return a pattern of whichever of some words fits, the longest first."""
    return "|".join(map(re.escape, sorted(expressions, key=lambda word: (-len(word), word))))


def replaced(sentence: str, found: re.Match[str], instead: str) -> str | None:
    """Return a sentence with a match replaced, or None where "a" and "an" would be wrong."""
    before = sentence[: found.start()].rsplit(" ", 2)[-2:]
    article = before[0].lower() if len(before) == 2 and not before[1] else ""
    vowels = tuple("aeiouAEIOU")
    if article in ("a", "an") and found[0].startswith(vowels) != instead.startswith(vowels):
        return None
    return sentence[: found.start()] + instead + sentence[found.end() :]


MOST_SYNONYMS = 3
# Of sentences with one word to change, those that need not wait for the others.
SINGLES = 0.05
WORD = re.compile(r"(?<![\w'-])[A-Za-z]+(?![\w'-])")
PREPOSITIONS = (
    "in|on|at|of|to|from|for|with|by|about|into|over|under|through|between|against|during|without"
    "|after|before|behind|near|across|around|toward|towards|inside|within"
)
# What follows a noun that stands alone: no other noun, which it would belong to.
ENDS = rf"(?=[.,;!?]| (?:{PREPOSITIONS}|and|or|but|when|where|while|because|as)\b)"
THE = "the|my|your|his|her|our|their|its"
# After these the form of the verb is theirs.
HELPS = re.compile(
    "(?:do|does|did|will|would|can|could|shall|should|may|might|must|lets?|makes?|made|see|saw|has"
    "|have|had|got|am|is|are|was|were|help(?:ed)?|than|as|if|wish|though|and|not|or|to|.*n't)? ?",
    re.IGNORECASE,
)
# Another tense would contradict them, or what another clause says.
DATED = re.compile(
    r"\b(yesterday|ago|last|tomorrow|now|would|could|used|was|were|had|today|currently"
    r"|will|can|is|are|am|be|if|until|when|while|since)\b|'(ll|m|re|s|ve)\b|\b([12]\d{3})\b",
    re.IGNORECASE,
)


def synonym(sentence: str, draw: random.Random) -> Change | None:
    """Put synonyms of the first sense in the place of one to three words."""
    lists = words().synonyms
    found = _known(sentence, lists)
    if not found:
        return None
    # Few sentences hold two or three: those that do are mostly used for it, and come first.
    many = min(len(found), MOST_SYNONYMS if draw.random() < 0.75 else 1)
    spare = len(found) == 1 and draw.random() > SINGLES
    chosen = sorted(draw.sample(found, many), key=lambda word: -word.start())
    text = sentence
    for word in chosen:
        other = cased(draw.choice(lists[word[0].lower()]), word[0])
        changed = replaced(text, word, other)
        if changed is None:
            return None
        text = changed
    return Change(text, chosen[-1][0].lower(), spare)


def spelling(sentence: str, draw: random.Random) -> Change | None:
    """Spell one word as American English does, or as British English does."""
    lists = words().spelling
    found = _known(sentence, lists)
    if not found:
        return None
    word = draw.choice(found)
    text = replaced(sentence, word, cased(lists[word[0].lower()], word[0]))
    return None if text is None else Change(text, min(word[0].lower(), lists[word[0].lower()]))


def _known(sentence: str, lists: Container[str]) -> list[re.Match[str]]:
    """Return the words that are listed; of names such as Labor Day nothing else is said."""
    words = (word for word in WORD.finditer(sentence) if word[0].lower() in lists)
    return [word for word in words if word[0].islower() or not word.start()]


def morphology(sentence: str, draw: random.Random) -> Change | None:
    """Change the number of one noun, or the tense of one verb, where no other word depends on it.

    Nouns are those after a preposition and an article or possessive; verbs are those right after a
    pronoun, and "say" after a noun.
    """
    numbers, plain, third, said = _patterns()
    found = [(word, _nouns()[word["form"]]) for word in numbers.finditer(sentence)]
    if not DATED.search(sentence):
        for pattern, place in ((plain, 0), (third, 1), (said, 0)):
            found += [
                (word, _tenses(place)[word["form"]])
                for word in pattern.finditer(sentence)
                if not word["before"] or not HELPS.fullmatch(word["before"])
            ]
    if not found:
        return None
    word, other = draw.choice(found)
    start, end = word.span("form")
    return Change(sentence[:start] + other + sentence[end:], min(word["form"], other))


@cache
def _nouns() -> dict[str, str]:
    plurals = words().plurals
    return plurals | {many: one for one, many in plurals.items()}


@cache
def _tenses(place: int) -> dict[str, str]:
    """Return past forms by present ones and the reverse: plain ones (0) or third persons (1)."""
    present = {row[place]: row[2] for row in words().verbs}
    return present | {past: form for form, past in present.items() if past not in present}


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    number = rf"\b(?:{PREPOSITIONS}) (?:{THE}) (?P<form>{any_of(list(_nouns()))}){ENDS}"
    before = r"(?P<before>\b[\w']+ )?"
    end = r"\b(?!['-]|,)"
    plain, third = (any_of(list(_tenses(place))) for place in (0, 1))
    many = any_of(list(words().plurals.values()))
    return (
        re.compile(number),
        re.compile(rf"{before}\b(?i:I|you|we|they) (?P<form>{plain}){end}"),
        re.compile(rf"{before}\b(?i:he|she|it) (?P<form>{third}){end}"),
        re.compile(rf"{before}\b(?:{many}) (?P<form>say|said){end}"),
    )


KEYS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
SHIFTS = (0.0, 0.25, 0.75)
SHORTEST_TYPO = 4
PARTICIPLE = r"(?: \w+ly| never| already| just| always)? (?:been|got|had|done|seen|gone|\w+ed)\b"
ASKING = "[Ww]hat|than|[Hh]ow|[Ww]ho|whom|[Ww]hen|[Ww]here|which|whatever|as"
NEXT_WORD = r"(?= [a-z])"
PRONOUNS = "i|you|he|she|it|we|they|that|this|there|the|anyone|anybody|everyone"
# A general is not meant.
NO_NAME = (
    "Motors|Electric|Mills|Assembly|Secretary|Manager|League|Counsel|Council|Hospital|Dynamics"
)
NO_TITLE = "Attorney|Brigadier|Major|Lieutenant|Secretary|Vice"


@cache
def neighbours() -> dict[str, str]:
    """Return the letters whose keys touch each letter's, on a QWERTY keyboard."""
    places = {
        letter: (row, x + SHIFTS[row])
        for row, keys in enumerate(KEYS)
        for x, letter in enumerate(keys)
    }
    return {
        letter: "".join(
            other
            for other, (row, x) in places.items()
            if other != letter and abs(row - at[0]) <= 1 and abs(x - at[1]) <= 1
            and (row == at[0] or abs(x - at[1]) < 1)
        )
        for letter, at in places.items()
    }  # fmt: skip


def typo(sentence: str, draw: random.Random) -> Change | None:
    """Put a neighbour on the keyboard in the place of a letter inside one word.

    Neither the first nor the last letter; and what comes out is no word.
    """
    found = [
        word
        for word in re.finditer(r"(?<![\w'-])[a-z]+(?![\w'-])", sentence)
        if len(word[0]) >= SHORTEST_TYPO
    ]
    if not found:
        return None
    word = draw.choice(found)
    place = draw.randrange(1, len(word[0]) - 1)
    letter = draw.choice(neighbours()[word[0][place]])
    slipped = word[0][:place] + letter + word[0][place + 1 :]
    if slipped in words().common:
        return None
    return put(sentence, word, slipped, "")


def contraction(sentence: str, draw: random.Random) -> Change | None:
    """Contract one pair of words, such as "do not", or write one contraction out."""
    found = [
        (word, forms)
        for pattern, forms in _contractions()
        for word in pattern.finditer(sentence)
        # "Don't you know?" cannot be written out where it stands.
        if not (sentence.endswith("?") and "'" in word[0])
    ]
    if not found:
        return None
    word, forms = draw.choice(found)
    form = word[0] if word[0] in forms else word[0][:1].lower() + word[0][1:]
    if form not in forms:
        return None
    return put(sentence, word, cased(forms[form], word[0]), min(form, forms[form]))


@cache
def _contractions() -> list[tuple[re.Pattern[str], dict[str, str]]]:
    """Return patterns of contractions that mean one thing, and of what can be contracted."""
    forms = words().contractions
    longer = {long: short for short, long in forms.items()}
    # 'd is "had" or "would", and what stands before a participle is no "it is" but "it has".
    written = [short for short in forms if not short.endswith(("n't", "'d"))]
    negated = [short for short in forms if short.endswith("n't")]
    have = [long for long in longer if long.endswith(" have")]
    first = ("let us", "there is", "that is", "what is")
    plain = [long for long in longer if not long.endswith((" have", " not")) and long not in first]
    alone = _not_after(ASKING)
    patterns = (
        (rf"\b(?i:{any_of(negated)})\b(?! (?:{PRONOUNS})\b)", forms),
        (rf"\b(?i:{any_of(written)})\b(?!{PARTICIPLE}){NEXT_WORD}", forms),
        (rf"\b(?i:{any_of([forms[short] for short in negated])})\b(?! (?:{PRONOUNS})\b)", longer),
        (rf"{alone}\b(?i:{any_of(have)})\b(?={PARTICIPLE})", longer),
        (rf"{alone}\b(?i:{any_of(plain)})\b{NEXT_WORD}", longer),
        (rf"(?:^|(?<=, ))\b(?i:{any_of(first)})\b{NEXT_WORD}", longer),
    )
    return [(re.compile(pattern), kind) for pattern, kind in patterns]


def _not_after(alternatives: str) -> str:
    """Return a pattern of a place that none of some words stands before, whatever their length."""
    return "".join(rf"(?<!\b{word} )" for word in alternatives.split("|"))


def punctuation(sentence: str, draw: random.Random) -> Change | None:
    """Add or leave out one sign, or the capital of one word; the words stay as they are."""
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
    if first and first[0].lower() in words().common:
        texts.append(sentence[0].lower() + sentence[1:])
    inner = list(re.finditer(r"(?<= )[a-z]{4,}\b", sentence))
    if inner:
        at = draw.choice(inner).start()
        texts.append(sentence[:at] + sentence[at].upper() + sentence[at + 1 :])
    return Change(draw.choice(texts), "") if texts else None


def abbreviation(sentence: str, draw: random.Random) -> Change | None:
    """Shorten one word or name, or write a short form out."""
    found = [
        (word, instead, short)
        for pattern, instead, short in _abbreviations()
        for word in pattern.finditer(sentence)
    ]
    if not found:
        return None
    word, instead, short = draw.choice(found)
    if not word.start():
        instead = instead[0].upper() + instead[1:]
    text = replaced(sentence, word, instead)
    if text is None:
        return None
    # One full stop ends both the short form and the sentence.
    text = re.sub(r"\.\.$", ".", text)
    return Change(text if text[-1] in ".?!" else f"{text}.", short.strip())


@cache
def _abbreviations() -> list[tuple[re.Pattern[str], str, str]]:
    """Return patterns, what takes the place of what they find, and the short form of the two."""
    rows: list[tuple[re.Pattern[str], str, str]] = []
    written_out: set[tuple[str, str]] = set()
    for long, short, beside in words().abbreviations:
        rows.append(
            (_beside(re.escape(long) + r"\b", "" if beside == "the" else beside), short, short)
        )
        if beside not in ("one way", "day") and (short, beside) not in written_out:
            written_out.add((short, beside))
            end = "" if short[-1] in ".%" else r"\b"
            rows.append((_beside(re.escape(short) + end, beside), long, short))
    return rows


def _beside(form: str, beside: str) -> re.Pattern[str]:
    start = "" if form.startswith("%") or form.startswith("\\ ") else r"(?<![\w-])"
    return re.compile(
        {
            "the": rf"(?<=\b[Tt]he ){form}(?![\w'-]| [a-z]+[^a-z .,]| [A-Z\d])",
            "Name": rf"{_not_after(NO_TITLE)}{start}{form}(?= (?!{NO_NAME})[A-Z][a-z])",
            "after": rf"(?<=[a-z] )(?<! the ){start}{form}(?! [A-Z]|')",
            "number": rf"{start}{form}(?= \d)",
            "count": rf"(?<=\d){form}(?!\w| [A-Z])",
            "date": rf"{start}{form}(?= \d)",
            "day": rf"(?<![A-Z]\w\w )(?<![a-z]-){start}{form}(?! [A-Z]|'|-)",
        }.get(beside, rf"{start}{form}(?![\w'-]| [A-Z\d])")
    )


# What has several counterparts; "his" and "her" are looked at where they stand.
ONE_WAY = {"Mrs.": "Mr.", "Miss": "Mr.", "his": "her", "him": "her", "hers": "his", "her": "his"}
# A word with a capital, other than the first, "I" and what follows a form of address.
NAME = re.compile(r"(?<=[^.?!] )(?<!Mr\. )(?<!Ms\. )(?<!Mrs\. )(?!I\b|Mr\.|Ms\.|Mrs\.)[A-Z]")
# After "her" these begin something else, so that it was an object.
AFTER_OBJECT = re.compile(
    rf"[.,;!?]|$| (?:{PREPOSITIONS}|and|or|but|that|a|an|the|as|if|when|how|what|because|up|out|off"
    r"|down|again|so|more|not|is|was|will|all|there|here|some|any|every|very|too|back|away|alone|now"
    r"|yesterday|today|tomorrow|then|i|you|(?!famil|on|ear|love|dai|elder|friend|ug|lone)\w+ly|he"
    r"|she|it|we|they|my|your|his|their)\b",
    re.IGNORECASE,
)
# After these it may be either: told her stories, told her to go.
GIVING = re.compile(
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
# With these a sentence is negative already, or says something odd once it is.
NEGATIVE = re.compile(
    r"\b(no|not|never|nothing|nobody|none|neither|nor|hardly|cannot|without|any\w*|yet|either|ever"
    r"|at all|until|before|unless|much|only|also|too|still|already|some\w*|few|little"
    r"|whether)\b|n't",
    re.IGNORECASE,
)
COUNTS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve")
COUNTED = re.compile(rf"(?<=[a-z] )(?:{any_of(COUNTS)}|[2-9]\d?)(?= [a-z]+s\b)(?! (?:and|th)\b)")
VERBS = {"is": "are", "was": "were", "has": "have", "does": "do"}
SINGULAR = {"this": "these", "a": "two", "an": "two"}
PLURAL = {"these": "this", "several": "one", "many": "one"}
# What a noun is said to be, or is compared with, has the number of something else.
PREDICATE = re.compile(
    r"\b(is|are|was|were|be|been|being|am|become|becomes|became|such|all|both|what|quite|half|once|times|as|"
    r"like|not|of|per|remain\w*|how|too|so|[a-z]+'[a-z]+)$",
    re.IGNORECASE,
)


def gender(sentence: str, draw: random.Random) -> Change | None:
    """Swap the gender of every pronoun, noun and form of address, where no name gainsays it."""
    if NAME.search(sentence) or sentence.split()[0].lower().strip(",'") not in words().common:
        return None
    swapped = words().gender | ONE_WAY
    found = [
        word
        for word in re.finditer(r"(?<![\w'-])(?:Mr\.|Ms\.|Mrs\.|[A-Za-z]+(?![\w-]))", sentence)
        # "King" inside of a sentence is part of a name.
        if word[0] in swapped or (word[0].lower() in swapped and not word.start())
    ]
    text = sentence
    for word in reversed(found):
        key = word[0] if word[0] in swapped else word[0].lower()
        rest, other = sentence[word.end() :], swapped[key]
        if key == "her" and word.start() and AFTER_OBJECT.match(rest):
            other = "him"
        elif key == "her" and GIVING.search(sentence[: word.start()]):
            return None
        elif key == "his" and re.match(r"[.,;!?]| (?:and|or|but)\b", rest):
            other = "hers"
        text = text[: word.start()] + cased(other, word[0]) + text[word.end() :]
    # "Sons and daughters" are the same the other way round.
    same = sorted(text.lower()) == sorted(sentence.lower())
    return None if same else Change(text, found[0][0].lower())


def negation(sentence: str, draw: random.Random) -> Change | None:
    """Say that it is not so, after the first auxiliary, or leave its "not" out."""
    removed = REMOVED.search(sentence)
    found = removed or INSERTED.search(sentence)
    rest = sentence.replace(removed[0], "", 1) if removed else sentence
    if not found or sentence.endswith("?") or NEGATIVE.search(rest):
        return None
    if removed:
        positive = removed["plain"] or ("will" if removed[0].lower() == "won't" else "can")
        other = cased(positive, removed[0])
    else:
        other = "cannot" if found[0] == "can" else f"{found[0]} not"
    return put(sentence, found, other, found[0].lower())


def number(sentence: str, draw: random.Random) -> Change | None:
    """Make one of several or several of one, with the verb that follows; or change a count."""
    changes = [_recounted(sentence, word, draw) for word in COUNTED.finditer(sentence)]
    changes += [_renumbered(sentence, word) for word in _numbered().finditer(sentence)]
    found = [change for change in changes if change is not None]
    return draw.choice(found) if found else None


def _recounted(sentence: str, word: re.Match[str], draw: random.Random) -> Change:
    digits = [str(count) for count in (range(2, 10) if len(word[0]) == 1 else range(10, 100))]
    others = digits if word[0].isdecimal() else COUNTS
    other = draw.choice([count for count in others if count != word[0]])
    return put(sentence, word, other, "a count")


@cache
def _numbered() -> re.Pattern[str]:
    one, many = (any_of(list(part)) for part in (words().plurals, words().plurals.values()))
    verbs = any_of([*VERBS, *VERBS.values()])
    return re.compile(
        rf"(?P<before>[\w']+,? )?\b(?P<noun>([Tt]his|[Aa]n?) ({one})"
        rf"|([Tt]hese|[Ss]everal|[Mm]any) ({many}))"
        rf"(?:(?= (?P<verb>{verbs}) )|{ENDS}(?! (?:and|or)\b))"
    )


def _renumbered(sentence: str, word: re.Match[str]) -> Change | None:
    before, (count, noun), verb = (word["before"] or "").strip(), word["noun"].split(), word["verb"]
    plurals, counts, verbs = words().plurals, SINGULAR, VERBS
    if count.lower() in PLURAL:
        plurals, verbs = ({b: a for a, b in forms.items()} for forms in (plurals, VERBS))
        counts = PLURAL
    # What begins a clause is its subject, whose verb may stand anywhere.
    subject = not verb and (not before or before.endswith(","))
    within = verb and re.fullmatch(PREPOSITIONS, before)
    if subject or within or PREDICATE.search(before) or (verb and verb not in verbs):
        return None
    start, end = word.span("noun")
    other = f"{cased(counts[count.lower()], count)} {plurals[noun]}"
    rest = sentence[end:] if not verb else f" {verbs[verb]}{sentence[word.end('verb') :]}"
    return Change(sentence[:start] + other + rest, count.lower())
