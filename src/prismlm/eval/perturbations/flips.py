"""Interventions: changes of a sentence after which it says something else."""

from __future__ import annotations

import random
import re
from functools import cache

from prismlm.eval.perturbations.lexical import ENDS, PREPOSITIONS
from prismlm.eval.perturbations.word_lists import Change, any_of, cased, words

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
    return Change(sentence[: found.start()] + other + sentence[found.end() :], found[0].lower())


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
    return Change(sentence[: word.start()] + other + sentence[word.end() :], "a count")


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
