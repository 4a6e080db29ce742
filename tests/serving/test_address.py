"""Addresses of servers."""

from __future__ import annotations

import pytest

from workbench.errors import ServingError
from workbench.serving.address import Address


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost:8000", "http://localhost:8000"),
        (" http://localhost:8000/v1/ ", "http://localhost:8000"),
        ("http://127.0.0.1:8000/metrics", "http://127.0.0.1:8000"),
        ("http://[::1]:9000/beam", "http://[::1]:9000/beam"),
        ("https://127.3.2.1", "https://127.3.2.1:443"),
    ],
)
def test_what_people_paste_is_understood(text: str, url: str) -> None:
    address = Address.of(text)
    assert address.url == url
    assert str(address) == url
    assert Address.of(address) == address


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no server's address"),
        ("http://", "no server's address"),
        ("ftp://127.0.0.1", "http or https"),
        ("http://127.0.0.1:99999", "no address"),
        ("http://127.0.0.1:0", "no server's address"),
        ("http://127.0.0.1:8000?key=1", "no server's address"),
        ("http://me:secret@127.0.0.1", "no user and no password"),
        ("http://127.0.0.1:80\r\nX: y", "control characters"),
        ("http://127.0.0.1\\@example.org", "control characters"),
        ("http://example.org:8000", "not this machine"),
        ("http://10.0.0.7:8000", "not this machine"),
        ("http://localhost.example.org", "not this machine"),
        ("http://0.0.0.0:8000", r"give http://127\.0\.0\.1 with its port"),
        ("http://[::]:8000", r"give http://127\.0\.0\.1 with its port"),
        (8000, "is text"),
    ],
)
def test_others_are_refused(text: object, words: str) -> None:
    with pytest.raises(ServingError, match=words) as found:
        Address.of(text)  # type: ignore[arg-type]
    assert "secret" not in str(found.value)


def test_another_machine_is_asked_only_if_it_is_meant() -> None:
    address = Address.of("https://gpu7.example.org/beam/v1", foreign=True)
    assert (address.host, address.port, address.path) == ("gpu7.example.org", 443, "/beam")
    with pytest.raises(ServingError, match="ssh -L"):
        Address.of(address)
