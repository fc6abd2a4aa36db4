"""One small random Llama, loaded once."""

import pytest
from llamas import SMALL

from treeattn_llama import Llama


@pytest.fixture(scope="session")
def model():
    return Llama.load(SMALL)
