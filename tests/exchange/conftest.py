"""The fixture of the tests of the exchange: each implementation that runs on this machine."""

from __future__ import annotations

import pytest
from support.contract import Implementation, implementations


@pytest.fixture(params=implementations())
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return request.param
