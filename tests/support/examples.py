"""How many examples a property is tried on."""

from hypothesis import settings

# Examples of a property that says nothing else, in the profile `ci`.
CI = 60


def examples(count: int) -> settings:
    """`count` examples in the profile `ci`, and in proportion in the others: `dev` has half as many,
    `long` twenty times as many, drawn anew every time.
    """
    return settings(max_examples=max(1, count * settings().max_examples // CI))
