from tests.cli.conftest import model_folder

__all__ = ["model_folder"]
