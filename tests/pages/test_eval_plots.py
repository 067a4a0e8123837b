import pytest

from prismlm.eval.suite import mean_figures, task_figures


def test_bars_and_band_by_hand():
    from prismlm.pages.eval_plots import accuracy_figure

    answers = {
        "task": "some",
        "of": 4,
        "chosen": [0, 1, 2, 3],
        "gold": [0, 1, 1, 1],
        "choices": [4, 4, 4, 4],
        "truncated": 0,
        "correct": {"plain": {"acc": [1, 1, 0, 0]}, "prototype_only": {"acc": [1, 0, 0, 0]}},
    }
    task = task_figures(answers) | {"title": "Some"}
    figure = accuracy_figure(
        {
            "tasks": [task],
            "mean": mean_figures([task]),
            "predictors": ["plain", "prototype_only"],
            "metric": "acc",
            "band_percent": 5.0,
        }
    )
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["Some", "mean"]
    assert [bar.get_height() for bar in axes.patches] == [0.5, 0.5, 0.25, 0.25]
    bands = [
        collection.get_paths()[0].get_extents()
        for collection in axes.collections
        if type(collection).__name__ == "FillBetweenPolyCollection"
    ]
    assert [(band.y0, band.y1) for band in bands] == [pytest.approx((0.475, 0.525))] * 2
