"""What was chosen by hand for :mod:`benchmarks.prototype_mixer.word_lists`, after reading the lists.

Spellings that are other words where they stand in a sentence are left out, as are synonyms that
WordNet puts first but that few people mean.
"""

from __future__ import annotations

import re

# American words of which the British form is another word, or which few write either way.
OTHER_MEANING = re.compile(
    "tires?$|checks?$|checker|curb|stor(y|ies)$|programs?$|practic|licens|meters?$|micromet|disks?$"
    "|draft|barks?$|c?alk|balk|caster|chim|dependents?$|ankle|among|sake|prize|wagon|tons$|perv"
    "|slough|prim|doorman|jail|formulas|gram|kilogram|milligram|descendant|annex|backward|onward"
    "|blond|fagot|asshole|flier|griffin|almanac|carcass|filet|g[ar]ge?s?$|gaged|gaging|naught|matte"
    "|whir|whiz|groin|cancelation|esthetic|epilog|monolog|prolog|analog|dialog|medieval|stoich"
    "|glycerin|nitro|dentin|tendentious|steat|unbeknown|numskull|briar|brier|savory|sheik|absinth"
    "|lupine|louver|saki|inflection|deflection|reflection|mispelled|spoiled|spilled|leaped|calib"
    "|judgmental|installs|instill|distill|special|cozy|remold|airfoil|parlor|manila|specter$"
)
CONTRACTED = set(
    "i'm you're we're they're it's that's there's he's she's i've you've we've they've i'll you'll "
    "he'll she'll it'll we'll they'll i'd you'd he'd she'd we'd they'd isn't aren't wasn't weren't "
    "don't doesn't didn't can't couldn't won't wouldn't shouldn't haven't hasn't hadn't mustn't "
    "needn't let's what's".split()
)
# Short forms of Textatistic's list, with what has to stand beside them; see ABBREVIATIONS.
TEXTATISTIC = {"U.S.": "anywhere", "U.K.": "anywhere", "U.N.": "anywhere", "Dr.": "Name", "Inc.": "after", "Vol.": "number"}
# Long form, short form, and where it is used: Name (before a name), after (after a name), number
# (before a number), count (after a number), date (a month before a number), day (a day that is no
# part of a name) or anywhere; "one way" is anywhere, of a short form that has other meanings.
ABBREVIATIONS = """
Mister|Mr.|Name
Professor|Prof.|Name
Senator|Sen.|Name
Governor|Gov.|Name
Representative|Rep.|Name
President|Pres.|Name
General|Gen.|Name
Captain|Capt.|Name
Colonel|Col.|Name
Lieutenant|Lt.|Name
Sergeant|Sgt.|Name
Major|Maj.|Name
Commander|Cmdr.|Name
Reverend|Rev.|Name
Saint|St.|Name
Mount|Mt.|Name
Fort|Ft.|Name
Corporation|Corp.|after
Company|Co.|after
Limited|Ltd.|after
Junior|Jr.|after
Senior|Sr.|after
Street|St.|after
Avenue|Ave.|after
Boulevard|Blvd.|after
University|Univ.|after
Department|Dept.|anywhere
January|Jan.|date
February|Feb.|date
August|Aug.|date
September|Sept.|date
October|Oct.|date
November|Nov.|date
December|Dec.|date
Monday|Mon.|day
Tuesday|Tue.|day
Wednesday|Wed.|day
Thursday|Thu.|day
Friday|Fri.|day
Saturday|Sat.|day
Sunday|Sun.|day
 percent|%|count
 per cent|%|count
 kilometers| km|count
 kilometres| km|count
 kilograms| kg|count
 meters| m|count
 metres| m|count
 centimeters| cm|count
 centimetres| cm|count
 millimeters| mm|count
 millimetres| mm|count
 miles| mi|count
 feet| ft|count
 inches| in.|count
 pounds| lb|count
 ounces| oz|count
 hours| hrs|count
 minutes| min|count
 seconds| sec|count
 gigabytes| GB|count
 megabytes| MB|count
 million|M|count
Number|No.|number
number|no.|number
Volume|Vol.|number
Chapter|Ch.|number
Figure|Fig.|number
versus|vs.|anywhere
television|TV|anywhere
telephone|phone|anywhere
advertisement|ad|anywhere
advertisements|ads|anywhere
refrigerator|fridge|anywhere
laboratory|lab|anywhere
examination|exam|anywhere
airplane|plane|anywhere
photograph|photo|anywhere
photographs|photos|anywhere
gymnasium|gym|anywhere
information|info|anywhere
approximately|approx.|anywhere
European Union|EU|anywhere
United States|US|anywhere
United Nations|UN|anywhere
New York City|NYC|anywhere
Los Angeles|L.A.|anywhere
Washington, District of Columbia|Washington, D.C.|anywhere
World War II|WWII|anywhere
World War I|WWI|anywhere
chief executive officer|CEO|anywhere
prime minister|PM|one way
Prime Minister|PM|one way
personal computer|PC|anywhere
personal computers|PCs|anywhere
doctorate|PhD|anywhere
"""
IRREGULAR_PLURALS = {
    "man": "men", "woman": "women", "child": "children", "person": "people", "foot": "feet",
    "tooth": "teeth", "mouse": "mice", "wife": "wives", "life": "lives", "knife": "knives",
    "leaf": "leaves", "half": "halves", "shelf": "shelves", "wolf": "wolves", "loaf": "loaves",
    "thief": "thieves", "hero": "heroes", "potato": "potatoes", "tomato": "tomatoes",
}  # fmt: skip
NO_PLURAL = set(
    "time day way end world moment morning evening afternoon night year week month hour minute age "
    "today lot bit number part case fact place rest sort kind use thing people mother father wife "
    "husband law house home water money air love life death war peace news body mind heart head "
    "hand face name century past future middle top bottom side rate order turn course majority "
    "series species means sun moon sky earth sea ground nothing something everything anything "
    "someone none percent police power process media data total force work love state term dead "
    "sake sum public back front start finish edge face basis truth matter ms mr".split()
)
NO_VERB = set("be have do can will may must need use let put cut set hit read get like lie".split())
IRREGULAR_VERBS = {
    line.split()[0]: (line.split()[1], line.split()[2])
    for line in """
say said said
make made made
go went gone
take took taken
come came come
see saw seen
know knew known
think thought thought
give gave given
find found found
tell told told
become became become
leave left left
feel felt felt
bring brought brought
begin began begun
keep kept kept
hold held held
write wrote written
stand stood stood
hear heard heard
mean meant meant
meet met met
run ran run
pay paid paid
sit sat sat
speak spoke spoken
lead led led
grow grew grown
lose lost lost
fall fell fallen
send sent sent
build built built
understand understood understood
draw drew drawn
break broke broken
spend spent spent
rise rose risen
drive drove driven
buy bought bought
wear wore worn
choose chose chosen
win won won
sell sold sold
teach taught taught
catch caught caught
eat ate eaten
sing sang sung
sleep slept slept
fight fought fought
throw threw thrown
show showed shown
""".strip().splitlines()
}
DOUBLED = set("occur prefer refer admit permit commit control begin forget regret".split())
NO_SYNONYM = set(
    "arrow pointer aurora daybreak despite contempt coronal wreath dozens loads scores stacks tons "
    "liquor spirits medulla myelin para parity permutation substitution impedance resistivity "
    "faculty module fixation regression prima stellar swollen vain monolithic executable alignment "
    "coalition aggregation graphics conduction controller accountant bounds deduce derive infer "
    "kinetics singularity conquer suppress accumulate compile turbulent disruptive diffusive "
    "dispersive percentage percent bacteria bacterium person somebody authorities doings dominate "
    "prevail delicious unify precedence fiscal perfectly utterly forthwith wellness notwithstanding "
    "earnestly scarcely plainly ordinarily horribly merrily doubtless para receipts finances "
    "theoretic invariably moderately unusually liberty autonomy frightful furious dichotomy "
    "depository spectrometry outflow expectancy daybreak familiarity acquaintance bounds leakage "
    "brutal footing stairs custody imposing stately elucidate preclude conformity conformance predominant strictly faithfully".split()
)
# Directed: the second can stand for the first wherever it stands, whatever its part of speech.
SYNONYMS = """
v: begin>start choose>select assist>help require>need provide>supply remain>stay observe>notice
v: recall>remember remember>recall alter>change buy>purchase construct>build build>construct
v: allow>permit permit>allow gather>collect collect>gather obtain>get speak>talk reply>answer
v: finish>complete happen>occur choose>pick vanish>disappear depart>leave donate>give grab>seize
v: inform>tell comprehend>understand demand>require attempt>try aid>help
n: error>mistake mistake>error shop>store store>shop rock>stone stone>rock infant>baby baby>infant
n: topic>theme theme>topic origin>source procedure>process intention>purpose film>movie movie>film
n: kid>child child>kid taxi>cab cab>taxi sofa>couch physician>doctor doctor>physician
n: lawyer>attorney attorney>lawyer trash>garbage garbage>trash jail>prison prison>jail ship>vessel
n: vessel>ship task>job gift>present car>auto company>firm journey>trip photo>picture pupil>student
n: battle>fight error>fault road>route street>road aim>goal goal>aim crowd>mass category>class
n: animal>creature creature>animal method>way plane>airplane location>spot
a: broad>wide wide>broad large>big big>large rapid>fast difficult>hard glad>happy correct>right
a: ill>sick sick>ill entire>whole important>significant famous>renowned silent>quiet
a: everyday>daily simple>easy sure>certain
r: thus>hence hence>thus often>frequently perhaps>maybe maybe>perhaps surely>certainly
r: nearly>almost almost>nearly quickly>fast
"""
