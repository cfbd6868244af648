"""The pool of ranks that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.support.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close()
