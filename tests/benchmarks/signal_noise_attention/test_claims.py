"""What the page answers to the source's claims, from made-up readings."""

import pytest

from benchmarks.signal_noise_attention import claims as signal_noise_claims


@pytest.mark.parametrize(
    ("effects", "ps", "expected", "answer"),
    [
        ([0.5, 0.3], [0.01, 0.04], 1, "**yes, in every seed**"),
        ([-0.5, -0.3], [0.01, 0.04], 1, "**no: the opposite, in every seed**"),
        ([-0.5, -0.3], [0.01, 0.04], -1, "**yes, in every seed**"),
        ([0.5, -0.3], [0.01, 0.04], 1, "not shown"),
        ([0.5, 0.3], [0.01, 0.06], 1, "not shown"),
        ([0.5], [0.01], 1, "yes, in the one seed there is"),
    ],
)
def test_a_claim_holds_where_every_seed_has_its_sign(effects, ps, expected, answer):
    assert signal_noise_claims.verdict(effects, ps, expected) == answer


def a_row(seed, variant="ratio π", **more):
    """A made-up reading: signal heads alike to uniform attention, noise heads on themselves."""
    even = {"first_share": 0.02, "self_share": 0.02, "relative_entropy": 1.0}
    heads = [
        {"group": "signal", "first_share": 0.015, "self_share": 0.02, "relative_entropy": 0.995},
        {"group": "noise", "first_share": 0.004, "self_share": 0.32, "relative_entropy": 0.5},
    ]
    compared = {"signal_median": 66.0, "noise_median": 50.0, "effect": 0.75, "p": 0.01}
    comparison = [compared | {"measure": name} for name in signal_noise_claims.MEASURES]
    uniform = even | dict.fromkeys(signal_noise_claims.MEASURES, 66.0) | even
    return {
        "variant": variant,
        "seed": seed,
        "heads": {"uses": {"heads": heads, "uniform": uniform}, "comparison": comparison},
        "spectra": {},
        "gradient": {"mean": 1.0, "greatest": 2.0},
        "corpus": {"fingerprint": "first"},
        "environment": {"date": "2026-01-01"},
    } | more  # fmt: skip


def rates(gain, length=0.1, resized=None):
    one = {
        "before": {"difference": 5.0, "signal": 6.0, "noise": 10.0},
        "after": {"signal": 6.5, "noise": 9.0}, "step_size": length, "gain_resized": resized,
        "gain": gain, "gain_over_scaled": gain, "gain_over_shuffled": gain,
        "gradient_cosine": 0.1, "incoherence": {"own": 0.1, "random": 0.1},
    }  # fmt: skip
    return [one, one]


def page_of(*rows, runs=None):
    return "\n".join(signal_noise_claims.claims(list(rows), runs))


def test_models_that_read_another_corpus_are_named():
    again = {"corpus": {"fingerprint": "second"}}
    others = [a_row(0, "GPT-2"), a_row(1, "GPT-2"), a_row(1)]
    page = page_of(a_row(0, **again), *others)
    assert "ratio π, seed 0: trained and read again by later code on the corpus built" in page
    assert "(second; all other models: first)" in page
    assert "built again" not in page_of(a_row(0), *others)


def test_training_is_held_against_random_steps_of_the_same_length():
    def read(seed, own, random=None):
        control = {} if random is None else {"untrained": {"rates": random}}
        return a_row(seed, spectra={"rates": own}, **control)

    def page(gain, length, resized=None, control=None):
        return page_of(
            *(
                read(seed, rates(gain + seed / 100, length, resized), rates(0.3, 0.01, control))
                for seed in range(3)
            )
        )

    verdict = "raise ΔR, at equal length: {}."
    unread = page_of(*(read(seed, rates(2.0 + seed / 10)) for seed in range(3)))
    assert "The untrained control was not read" in unread
    assert "untrained |" not in unread
    # Ten times the gain with a step that is ten times as long is nothing; nor is five times.
    alike = page(2.99, 0.1)
    assert verdict.format("not shown") in alike
    assert "A trained step is 10 to 10 times as long" in alike
    assert (
        "| ratio π, untrained | 5 | 0.3 (6 of 6) | 0.3 (6 of 6) | 0.3 (6 of 6) | +0.5 | -1 | "
        in alike
    )
    assert "| 0.01 | 30 | – | 0.1 | 0.1 | 0.1 |" in alike
    assert verdict.format("**no**") in page(1.5, 0.1)
    assert verdict.format("**yes**") in page(4.5, 0.1)
    # By length it gains less, and scaled to one length more: steps are no straight lines.
    assert verdict.format("not shown") in page(1.5, 0.1, resized=0.4, control=1.0)
    assert verdict.format("**yes**") in page(4.5, 0.1, resized=0.4, control=1.0)


def test_noise_heads_are_not_what_makes_a_sink_small():
    page = page_of(a_row(0), a_row(0, "GPT-2"))
    assert f"| ratio π | {0.015 / 0.98:.3g} | {0.015 / 0.98:.3g} | {0.02 / 0.98:.3g} |" in page
    assert "No model here has a sink" in page
    assert "Smaller with ratio π than with GPT-2" not in page
    with_sink = a_row(0, "GPT-2")
    with_sink["heads"]["uses"]["heads"] = [
        {"group": "attention", "first_share": 0.4, "self_share": 0.2, "relative_entropy": 0.5}
    ]
    with_sink["heads"]["comparison"] = None
    page = page_of(a_row(0), with_sink)
    assert "Above uniform attention, in some seed: GPT-2." in page
    # 0.4 of the 0.8 that is not on the token itself.
    less = f"{0.015 / 0.98 - 0.5:+.4f}"
    assert f"Smaller with ratio π than with GPT-2: not shown (difference {less}, 1 seed)" in page


def test_reaching_further_is_not_credited_to_the_ratio():
    rows = [a_row(seed) for seed in range(3)] + [a_row(seed, "ratio 1") for seed in range(3)]
    page = page_of(*rows)
    assert "which attend everywhere alike: **yes, in every seed**. That alone does not" in page
    assert (
        "The gap between the groups is narrower with ratio 1 than with ratio π: not shown" in page
    )
    assert "By reach and entropy signal heads are near uniform attention" in page
    settings = {"steps": 750, "batch_size": 8, "data": {"length": 256}}
    few = page_of(*rows, runs=[{"settings": settings}])
    assert "trained for 750 steps, at most 1,536,000 tokens: 0.47% of the source's" in few


def test_resonance_is_judged_by_what_was_trained():
    def read(seed, variant, normalised):
        layer = {"signal_noise": 2.0}
        own = {"ratio": "own", "scaling": "base", "normalised": normalised, "layers": [layer]}
        other = own | {"ratio": "3", "position": {"normalised": 0.5}}
        return a_row(seed, variant, spectra={"cross_terms": [own, other]})

    ours = [read(seed, "ratio π", 0.4 + seed / 1000) for seed in range(3)]
    page = page_of(*ours, *(read(seed, "ratio 2", 0.5) for seed in range(3)))
    assert "| ratio 2 | 2 (2 to 2) | 0.5000 (0.5000 to 0.5000) | 3 |" in page
    assert "than with ratio 2: **yes, in every seed**" in page
    assert "π keeps the groups further apart than other ratios: **yes**" in page
    page = page_of(*ours, *(read(seed, "ratio 3", 0.3) for seed in range(3)))
    assert "other ratios: **no**; less far than with ratio 3." in page
    assert "other ratios: not shown." in page_of(ours[0], read(0, "ratio 2", 0.5))
    # By the settings, whatever the reading says: 1/√30000 and √(3/10000) of a head of 20.
    assert "| 3 | base | 0.401 | 0.5 | 0 (1:1) | 0 (3:1) |" in page


def test_losses_beyond_the_trained_length_have_an_error():
    def read(seed, difference):
        bucket = {"low": 32, "high": 63, "difference": difference, "difference_error": 0.004}
        loss = {"trained_length": 32, "documents": 7, "buckets": [bucket]}
        return a_row(seed, spectra={"loss": loss})

    page = page_of(read(0, 0.25), read(1, 0.5), a_row(0, "GPT-2"))
    assert "| ratio π | +0.375 (+0.250 to +0.500) ± 0.004 | 7 |" in page
    assert "GPT-2 is missing: its learned positions" in page


def test_roles_are_beside_random_weights():
    best = {"lift": 2.0, "control": 1.0, "excess": 0.5, "q": 0.01}
    role = {"role": "subject", "found": 3, "untrained": 1, "best": best}
    read = {"sentences": 12, "heads": 6, "draws": 10_000, "level": 0.05, "roles": [role]}
    page = page_of(a_row(0, roles=read), a_row(1))
    assert "| ratio π | subject | 3 | 1 | 6 | 2.00 | 1.00 | 0.50 | 0.01 |" in page
    assert "in every seed that was read: ratio π, subject." in page
    assert "Do heads look for" not in page_of(a_row(1))
