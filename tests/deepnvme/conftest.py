"""What tests of both handles are given."""

from __future__ import annotations

import pytest
from deepnvme_programs import HANDLES

from swapper.deepnvme import aio_handle


@pytest.fixture(params=HANDLES, ids=["aio", "gds"])
def make(request: pytest.FixtureRequest) -> type[aio_handle]:
    return request.param  # type: ignore[no-any-return]
