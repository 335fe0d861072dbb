"""Which hosts and origins the guard accepts."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.access.guard import AllowedClients, is_allowed_host, is_foreign, is_loopback

NO_CLIENTS = AllowedClients()
LABELS = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=12)
NAMES = st.lists(LABELS, min_size=2, max_size=4).map(".".join)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1", "127.9.8.7:8000", "[::1]", "[::1]:8000", " 127.0.0.1 "],
)
def test_addresses_of_this_machine_are_allowed(host: str) -> None:
    assert is_allowed_host(host, is_local=True, allowed=NO_CLIENTS)
    assert is_allowed_host(host, is_local=False, allowed=NO_CLIENTS)


@pytest.mark.parametrize(
    "host", ["", ":", "0.0.0.0", "[::]", "0", "127.1", "2130706433", "0x7f.0.0.1", "localhost:80:90", "[::1"]
)
def test_other_spellings_of_our_address_are_not_guessed(host: str) -> None:
    is_valid = host == "[::1"
    assert is_allowed_host(host, is_local=True, allowed=NO_CLIENTS) == is_valid


def test_a_server_that_other_machines_reach_accepts_addresses_and_configured_names() -> None:
    allowed = AllowedClients.of([" Ledger.Example "], [])
    for host in ("10.1.2.3:8000", "[fe80::1]:8000", "ledger.example:8000", "LEDGER.example."):
        assert is_allowed_host(host, is_local=False, allowed=allowed)
    assert not is_allowed_host("10.1.2.3", is_local=True, allowed=allowed)
    assert not is_allowed_host("other.example", is_local=False, allowed=allowed)


@given(NAMES, st.booleans(), st.integers(0, 65535))
def test_no_dns_name_is_allowed_unless_it_is_configured(name: str, is_local: bool, port: int) -> None:
    if not any(character.isalpha() for character in name):
        name = f"a.{name}"
    assert not is_allowed_host(f"{name}:{port}", is_local=is_local, allowed=NO_CLIENTS)
    assert is_allowed_host(f"{name}:{port}", is_local=is_local, allowed=AllowedClients.of([name], []))


@given(st.text(max_size=60))
def test_any_header_is_judged_without_an_error(host: str) -> None:
    is_allowed_host(host, is_local=True, allowed=NO_CLIENTS)
    is_foreign({"Origin": host, "Host": "localhost"}, NO_CLIENTS)


def test_only_pages_of_the_server_itself_and_of_allowed_origins_may_call() -> None:
    own = {"Host": "localhost:8000", "Origin": "http://localhost:8000"}
    foreign = {"Host": "localhost:8000", "Origin": "https://app.example"}
    assert not is_foreign(own, NO_CLIENTS)
    assert is_foreign(foreign, NO_CLIENTS)
    assert not is_foreign(foreign, AllowedClients.of([], ["https://App.example/"]))
    assert not is_foreign(foreign, AllowedClients.of([], ["*"]))


def test_loopback_is_recognised() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "ledger.example", "")))
