"""The command line as the tests of it run it."""

from tests.cli.conftest import haloc, refused

__all__ = ["haloc", "refused"]
