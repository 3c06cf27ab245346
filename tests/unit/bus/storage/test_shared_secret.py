"""Decoding of configured secrets."""

import pytest

from kvmesh.bus.storage.shared_secret import SecretUnusable, parse_secret


def test_a_secret_is_two_hexadecimal_digits_for_each_byte() -> None:
    assert parse_secret("ab" * 32, 32, "kvbm.key") == b"\xab" * 32


@pytest.mark.parametrize("bad", ["", "ab", "xy" * 32, "ab" * 33])
def test_an_invalid_secret_is_rejected_by_the_name_of_its_setting(bad: str) -> None:
    with pytest.raises(SecretUnusable, match=r"kvbm\.key must be 64 hex") as error:
        parse_secret(bad, 32, "kvbm.key")
    assert error.value.configured
    assert not bad or bad not in str(error.value)
