"""Programs that tests run for real."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str, package: str) -> str:
    """Path of a program. Where it is missing its tests are skipped, in CI (`CI` set) they fail."""
    path = shutil.which(name)
    if path is None:
        message = f"these tests need {name}: apt-get install {package}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path
