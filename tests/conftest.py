"""Settings shared by all tests: hypothesis profiles (`pytest --hypothesis-profile=ci` is what
scripts/test.sh runs), and the marks of whole folders."""

import pytest
from hypothesis import HealthCheck, settings

# No deadline: ranks share this machine's cores, so the time of one example says nothing.
# ci repeats the same examples every time, so that a red run can be run again; dev explores, and
# long does so for hours: `pytest --hypothesis-profile=long tests/property`.
settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", deadline=None, max_examples=1200, suppress_health_check=list(HealthCheck))
settings.register_profile("dev", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dev")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks = {"distributed": pytest.mark.dist, "megatron": pytest.mark.megatron}
    for item in items:
        if (mark := marks.get(item.path.parent.name)) is not None:
            item.add_marker(mark)
