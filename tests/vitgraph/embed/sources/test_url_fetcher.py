"""One fetcher of URLs: https, public addresses, the address that was checked, and limits."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitgraph
from tests.support.hub.tls_server import TlsServer, make_certificate, resolver
from tests.support.photographs import china
from vitgraph.fetching import Fetcher, addresses_of, displayed_url, is_public

PUBLIC = "93.184.216.34"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def server(certificate: Path) -> Iterator[TlsServer]:
    with TlsServer(certificate).running() as made:
        made.files["/a.png"] = png()
        yield made


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Leads every connection to loopback; returns the addresses that were asked for."""
    asked: list[tuple[str, int]] = []
    connect = socket.create_connection

    def create_connection(address: tuple[str, int], *rest: Any) -> socket.socket:
        asked.append(address)
        return connect(("127.0.0.1", address[1]), *rest)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    return asked


def png() -> bytes:
    file = io.BytesIO()
    china().resize((40, 30)).save(file, "PNG")
    return file.getvalue()


# --- what is read ---------------------------------------------------------------------------------


def test_the_checked_address_is_the_one_connected_to(
    server: TlsServer, connected: list[tuple[str, int]]
) -> None:
    """A name server that answers with loopback the second time is not asked a second time."""
    answers = [[PUBLIC], ["127.0.0.1"]]
    rebinding = Fetcher(resolve=lambda host, port: answers.pop(0), context=server.context)
    assert rebinding.read(server.url("/a.png")) == png()
    assert connected == [(PUBLIC, server.port)]
    assert len(answers) == 1
    assert [(host, path) for host, path, _ in server.requests] == [
        (f"photos.test:{server.port}", "/a.png")
    ]


def test_no_proxy_and_no_credentials_of_the_environment_are_used(
    server: TlsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    (tmp_path / ".netrc").write_text("machine photos.test login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    assert server.fetcher().read(server.url("/a.png")) == png()
    (_, _, headers), *_ = server.requests
    assert set(headers) == {"Host", "User-Agent", "Accept", "Accept-Encoding", "Connection"}


def test_paths_and_queries_are_sent_as_they_are_meant(server: TlsServer) -> None:
    server.files["/b%20c%C3%A9.png?a=1&b=%2F"] = b"found"
    assert server.fetcher().read(server.url("/b cé.png?a=1&b=%2F#part")) == b"found"


def test_the_second_address_is_tried_where_the_first_is_silent(
    server: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.create_connection

    def create_connection(address: tuple[str, int], *rest: Any) -> socket.socket:
        if address[0] == "127.0.0.2":
            raise TimeoutError("timed out")
        return connect(address, *rest)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    two = server.fetcher(resolve=lambda host, port: ["127.0.0.2", "127.0.0.1"])
    assert two.read(server.url("/a.png")) == png()


def test_a_file_without_a_length_is_read_to_its_end(server: TlsServer) -> None:
    server.files["/b?chunked"] = b"12345"
    assert server.fetcher().read(server.url("/b?chunked")) == b"12345"


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "255.255.255.255", "224.0.0.1", "192.0.0.192", "198.18.0.1", "240.0.0.1"),
        *("::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "::7f00:1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a00:1", "2002:a00:1::"),
        *("2001:db8::1", "fe80::1%1"),
    ],
)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not is_public(address)
    for addresses in ([address], [PUBLIC, address]):
        careful = Fetcher(resolve=lambda host, port, found=addresses: found)
        with pytest.raises(ValueError, match=r"^https://photos\.test/a: .*not public: only files"):
            careful.read("https://photos.test/a")


@pytest.mark.parametrize(
    "address", [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses_are_known_as_such(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f.1", "[::1]", "[::ffff:7f00:1]"])
def test_every_spelling_of_loopback_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match=r"has the address .*, which is not public|cannot be fet"):
        Fetcher().read(f"https://{host}/a.png")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://photos.test/a.png", r"^http://photos\.test/a\.png: is not an https URL"),
        ("file:///etc/passwd", "is not an https URL"),
        ("https:///a.png", "is not an https URL"),
        ("https://me:secret@photos.test/a", r"^https://photos\.test/a: holds a user name"),
        ("https://me@photos.test/a", "no credentials are sent: leave out what is before @"),
        ("https://photos.test:99999/a", "is no URL .*0-65535"),
        ("https://[::1/a", "is no URL"),
        ("https://nowhere.test/a?token=1", r"^https://nowhere\.test/a: cannot be fetched .*known"),
    ],
)
def test_urls_that_break_a_rule_are_refused_in_words(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Fetcher(resolve=resolver(photos_test=[PUBLIC])).read(url)
    assert "secret" not in str(caught.value)
    assert "token" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("http://cdn.test/a.png", r"/r: leads to http://cdn\.test/a\.png: is not an https URL"),
        ("https://inside.test/a", r"inside\.test has the address 10\.0\.0\.1, which is not public"),
        ("https://me:secret@cdn.test/a", "holds a user name"),
        ("file:///etc/passwd", "is not an https URL"),
    ],
)
def test_every_hop_of_a_redirect_is_checked_again(
    place: str, message: str, server: TlsServer
) -> None:
    server.redirects["/r"] = place
    known = resolver(photos_test=["127.0.0.1"], inside_test=["10.0.0.1"])
    careful = Fetcher(allowed_hosts=["photos.test"], resolve=known, context=server.context)
    with pytest.raises(ValueError, match=message) as caught:
        careful.read(server.url("/r"))
    assert "secret" not in str(caught.value)


def test_five_redirects_are_followed_and_a_sixth_is_refused(server: TlsServer) -> None:
    for number in range(1, 7):
        server.redirects[f"/{number}"] = f"/{number - 1}" if number > 1 else "/a.png"
    assert server.fetcher().read(server.url("/5")) == png()
    with pytest.raises(ValueError, match=r"/6: is redirected more than 5 times"):
        server.fetcher().read(server.url("/6"))


def test_a_redirect_to_another_host_is_followed(server: TlsServer) -> None:
    server.redirects["/r"] = server.url("/a.png", "cdn.test")
    assert server.fetcher().read(server.url("/r")) == png()
    assert [host.split(":")[0] for host, *_ in server.requests] == ["photos.test", "cdn.test"]


def test_only_hosts_that_are_allowed_may_be_of_the_own_network(server: TlsServer) -> None:
    known = resolver(photos_test=["127.0.0.1"], cdn_test=["127.0.0.1"])
    one = Fetcher(allowed_hosts=["Photos.test"], resolve=known, context=server.context)
    assert one.read(server.url("/a.png")) == png()
    with pytest.raises(ValueError, match=r"cdn\.test has the address 127\.0\.0\.1"):
        one.read(server.url("/a.png", "cdn.test"))


def test_a_certificate_of_another_host_or_of_nobody_is_refused(server: TlsServer) -> None:
    other = resolver(other_test=["127.0.0.1"], photos_test=["127.0.0.1"])
    allowed = ["other.test", "photos.test"]
    strict = Fetcher(allowed_hosts=allowed, resolve=other, context=server.context)
    with pytest.raises(ValueError, match=r"certificate is not valid for 'other\.test'"):
        strict.read(server.url("/a.png", "other.test"))
    with pytest.raises(ValueError, match=r"self[- ]signed certificate"):
        Fetcher(allowed_hosts=allowed, resolve=other).read(server.url("/a.png"))


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/b", "/b?chunked"])
def test_a_file_over_the_limit_of_bytes_is_refused(path: str, server: TlsServer) -> None:
    server.files[path] = bytes(1001)
    assert len(server.fetcher(most_bytes=1001).read(server.url(path))) == 1001
    with pytest.raises(ValueError, match="is larger than 1,000 bytes; download it yourself"):
        server.fetcher(most_bytes=1000).read(server.url(path))


def test_a_server_that_sends_byte_by_byte_meets_the_limit_of_time(server: TlsServer) -> None:
    server.files["/slow"], server.slowly["/slow"] = bytes(b"x" * 1000), 0.02
    with pytest.raises(ValueError, match=r"/slow: took longer than 0\.5 s; download it yourself"):
        server.fetcher(seconds=0.5).read(server.url("/slow"))
    assert not server.finished  # the answer was still being sent


def test_a_resolver_that_never_answers_meets_the_limit_of_time() -> None:
    ended = threading.Event()

    def resolve(host: str, port: int) -> list[str]:
        ended.wait(60)
        return []

    with pytest.raises(ValueError, match=r"took longer than 0\.2 s"):
        Fetcher(resolve=resolve, seconds=0.2).read("https://photos.test/a")
    assert not ended.is_set()
    ended.set()


def test_an_answer_that_breaks_off_is_an_error(server: TlsServer) -> None:
    server.files["/b"] = b"12345"
    server.lying.add("/b")
    with pytest.raises(ValueError, match="broke off 10 bytes before the end"):
        server.fetcher().read(server.url("/b"))


def test_other_answers_than_200_are_named(server: TlsServer) -> None:
    with pytest.raises(ValueError, match=r"^https://photos.test:\d+/x: the server answers 404 Not"):
        server.fetcher().read(server.url("/x?secret=1"))


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    gone = Fetcher(allowed_hosts=["photos.test"], resolve=resolver(photos_test=["127.0.0.1"]))
    with pytest.raises(ValueError, match=r"cannot be fetched \(no connection to 127\.0\.0\.1: .*"):
        gone.read(f"https://photos.test:{port}/a.png")


def test_the_system_s_resolver_knows_loopback() -> None:
    assert {"127.0.0.1"} >= set(addresses_of("127.0.0.1", 443))


def test_a_url_is_shown_without_its_secrets() -> None:
    assert displayed_url("https://me:pw@x.org/a.png?sig=1#b") == "https://x.org/a.png"
    assert len(displayed_url("https://x.org/" + "a" * 1000)) == 200


# --- load_image -----------------------------------------------------------------------------------


@pytest.fixture
def reads_from_the_server(server: TlsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitgraph.fetching.Fetcher", server.fetcher)


def turned(suffix: str) -> bytes:
    """A photograph that is stored lying on its side."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    china().resize((40, 30)).save(file, suffix, exif=exif)
    return file.getvalue()


@pytest.mark.usefixtures("reads_from_the_server")
def test_load_image_reads_urls_and_files_upright(server: TlsServer, tmp_path: Path) -> None:
    server.files["/turned.png"] = turned("PNG")
    (tmp_path / "turned.png").write_bytes(turned("PNG"))
    upright = np.asarray(china().resize((40, 30)).transpose(Image.Transpose.ROTATE_270))
    for source in (
        server.url("/turned.png"),
        tmp_path / "turned.png",
        str(tmp_path / "turned.png"),
    ):
        image = vitgraph.load_image(source)
        assert isinstance(image, Image.Image)
        assert np.array_equal(np.asarray(image), upright)


@pytest.mark.usefixtures("reads_from_the_server")
def test_load_image_names_what_is_no_image(server: TlsServer, tmp_path: Path) -> None:
    server.files["/page"] = b"<html>"
    with pytest.raises(
        ValueError, match=r"^https://photos\.test:\d+/page: cannot be read as an im"
    ):
        vitgraph.load_image(server.url("/page#part"))
    with pytest.raises(ValueError, match=r"gone\.png: there is no such file"):
        vitgraph.load_image(tmp_path / "gone.png")
    with pytest.raises(ValueError, match=r"^http://photos\.test/a: is not an https URL"):
        vitgraph.load_image("http://photos.test/a")
