"""The page says what made-up results say."""

from benchmarks.uncertainty_feedback import render as render_uncertainty_feedback
from tests.benchmarks.uncertainty_feedback.made_up import checks_of, interval, row


def test_the_page_says_what_the_figures_say():
    better = [row("no feedback", 0, 5.0), row("two passes", 0, 4.5, more=0.2)]
    better += [row("shuffled", 0, 4.9, signal="shuffled")]
    page = render_uncertainty_feedback.render(better, {})
    assert "LLaMA, 65,536 rows: that it lowers the loss is not shown: it is below both" in page
    assert "in the one seed there is, which may be noise" in page
    assert "| LLaMA | two passes | 4.5000 | -0.5000 | one seed | 100 | 4,000 | 1.30 |" in page
    assert "two passes: it uses the signal" in page
    row_of = "| LLaMA | two passes | 4.0000 | +0.2000 (+0.1900 to +0.2200) | +0.5000 (+0.4000 to "
    assert row_of + "+0.6000) |" in page
    assert "| 25.0% | 1.25% | one seed |" in page
    levels = "| 1,000 | 500 | drawn | own | 100 (10.0%) | 50 (10.0%) | 4.5000 | 1 of 1 seed |"
    assert levels in page
    alike = [
        row(name, seed, value + seed + 0.001 * len(name) * seed, signal=signal)
        for name, value, signal in [
            ("no feedback", 5.0, "own"), ("two passes", 4.5, "own"), ("shuffled", 4.9, "shuffled")
        ]
        for seed in range(3)
    ]  # fmt: skip
    page = render_uncertainty_feedback.render(alike, {})
    assert "LLaMA, 65,536 rows: **it lowers the loss**, below both" in page
    # With the shuffled signal as good, or a second seed that is worse, it does not work.
    control = [*better[:2], row("shuffled", 0, 4.4, signal="shuffled")]
    page = render_uncertainty_feedback.render(control, {})
    assert "**it does not work here**: below no feedback in 1 and below the shuf" in page
    second = [row("no feedback", 1, 5.0), row("two passes", 1, 5.2), row("shuffled", 1, 5.3)]
    second[2]["settings"]["uncertainty_feedback"]["signal"] = "shuffled"
    page = render_uncertainty_feedback.render([*better, *second], {})
    assert "no feedback in 1 and below the shuffled signal in 2 of 2 seeds" in page
    assert "that it uses the signal is not shown" in page
    assert (
        "| LLaMA | two passes | 4.8500 (4.5000 to 5.2000) | -0.1500 (-0.5000 to +0.2000) |" in page
    )
    assert "ProtoT" not in page


def test_the_page_says_what_the_source_s_way_to_train_gave():
    runs = [row("no feedback", 0, 5.5), row("two passes", 0, 4.5)]
    runs += [row("no feedback, rebuilt corpus", seed, 5.0) for seed in (0, 1)]
    runs += [
        row("previous batch", seed, loss, more=0.5, signal="previous_batch")
        for seed, loss in ((0, 5.25), (1, 5.5))
    ]
    page = render_uncertainty_feedback.render(runs, {})
    own = "| LLaMA | previous batch | 5.8750 (5.7500 to 6.0000) | +0.8750 (+0.7500 to +1.0000) |"
    assert own in page
    assert "| 0 | 5.7500 | +0.7500 | 5.7500 | 5.7500 | 5.2500 | -1.0000 |" in page
    claim = "Lower loss with the codes of the previous batch than without feedback"
    answer = "the opposite in all 2 seeds, not significant"
    assert f"- {claim}: {answer} (difference by seed +0.7500, +1.0000; mean +0.8750" in page


def test_the_page_says_what_the_checks_say():
    page = render_uncertainty_feedback.render([], {}, [checks_of(0, True), checks_of(1, False)])
    good, bad = "+0.5000 (+0.1000 to +0.9000)", "+0.1000 (-0.2000 to +0.4000)"
    assert f"| ablation | two passes | 1 of 2 | {good}; {bad} |" in page
    assert f"| hedging | two passes | 1 of 2 | {good}, 7 words; {bad}, 7 words |" in page
    # Of the later layers, 1 and 2.
    assert "| attention | two passes | 1 of 2 | ρ +0.300 in layer 1, +0.500 (" in page
    assert "| recovery | two passes | 1 of 2 | -0.500 (-0.900 to -0.100); -0.100 (" in page
    assert "| probe | two passes | 1 of 2 | R² 0.700 at depth 0.50, +0.500 (" in page
    # No signal has to be beaten as well; and what was not done, or had nothing to compare.
    worse = checks_of(0, True)
    worse["report"]["mistakes"]["loss_against_zero"] = interval(-1, -2, 0.5)
    worse["report"]["attention"] = None
    worse["report"]["left_out"] = {"attention": "no heads"}
    worse["report"]["hedging"]["change"] = None
    page = render_uncertainty_feedback.render([], {}, [worse])
    assert "| recovery | two passes | 0 of 1 |" in page
    assert "| attention | two passes | 0 of 1 | not done: no heads |" in page
    assert "| hedging | two passes | 0 of 1 | nothing to compare, 7 words |" in page
