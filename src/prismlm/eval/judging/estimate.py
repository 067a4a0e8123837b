"""What a study of continuations would take, from writing one and judging one."""

from __future__ import annotations

from itertools import combinations

from prismlm.cost import Cost, peak_memory, seconds_of
from prismlm.eval.judging.examination import examination_pairs
from prismlm.eval.judging.judges import CHARACTERS_PER_TOKEN, LocalJudge, Pair
from prismlm.eval.judging.study import Study

BYTES_PER_TOKEN, BYTES_PER_VERDICT = 12, 110


def estimate_judging(study: Study) -> Cost:
    """Return what :func:`prismlm.eval.judging.study.run_judging` would take; writes nothing.

    Questions about models are counted as if none had been asked and no two texts were alike.

    Raises:
        InputError, FormatError: as it.
    """
    seconds, new = 0.0, 0
    for name in study.models:
        writer = study.writer(name)
        left = writer.left(study.prompts)
        new += len(left)
        if left:
            seconds += len(left) * seconds_of(lambda w=writer, p=left[0]: w.write(p), warm=False)
    figures, unknown = {"continuations": new}, tuple[str, ...]()
    disk, judge = new * study.how.tokens * BYTES_PER_TOKEN, study.open_judge()
    if judge is not None:
        examined = examination_pairs(study.prompts, study.how.seed)
        pairs = [one for some in examined.values() for one in some]
        # Of a continuation nothing is known but how long it may be.
        texts = [letter * study.how.tokens * CHARACTERS_PER_TOKEN for letter in "xy"]
        games = list(combinations(study.models, 2))
        pairs += [Pair(prompt.text, *texts) for prompt in study.prompts for _ in games]
        asked, tokens = judge.left(pairs)
        figures |= {"questions": asked, "tokens_in": tokens}
        disk += asked * BYTES_PER_VERDICT
        if isinstance(judge, LocalJudge) and asked:
            question = judge.question(pairs[0])
            seconds += asked * seconds_of(lambda: judge.log_probabilities(question), warm=False)
        elif asked:
            unknown = ("how fast the endpoint is, and whether it thinks before it answers.",)
    return Cost(
        None if unknown else seconds,
        peak_memory(),
        disk,
        figures,
        basis="What is kept is not made again. Tokens are taken to have four characters each.",
        unknown=unknown,
    )
