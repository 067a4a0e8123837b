"""Comparing what two processes print: threads may sum in another order."""

import pytest


def assert_close(found, expected, path="$"):
    """Assert that two JSON values agree, numbers to a relative 1e-4 or an absolute 1e-6."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), path
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_close(found[key], value, f"{path}.{key}")
    elif isinstance(expected, list):
        assert isinstance(found, list), path
        assert len(found) == len(expected), path
        for place, value in enumerate(expected):
            assert_close(found[place], value, f"{path}[{place}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), path
    else:
        assert found == expected, path
