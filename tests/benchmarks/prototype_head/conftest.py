from tests.training.conftest import same_settings, settings

__all__ = ["same_settings", "settings"]
