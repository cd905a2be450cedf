"""The Host header: another site's page that points its name at loopback gets nothing."""

import asyncio

import pytest

from stoop.config.errors import ConfigError
from stoop.server.settings import ServerSettings, host_name
from support.fake_llm import FakeLLM
from support.http import USER, Connection, call, make_server, post, refusal

CHAT = "/v1/chat/completions"
ASK = {"messages": USER}
EVIL = {"host": "evil.example:8000"}


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/stats", "/v1/models"])
def test_other_names_are_refused_on_every_route(path):
    app, _ = make_server()
    error = refusal(call(app, "GET", path, headers=EVIL), 403, '"evil.example"')
    assert error["code"] == "host_not_allowed" and "--allow-host" in error["message"]
    assert call(app, "GET", path).status_code == 200


def test_no_answer_is_generated_for_another_name():
    llm = FakeLLM()
    app, _ = make_server(llm)
    refusal(post(app, CHAT, ASK, headers=EVIL), 403)
    assert not llm.seen


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:1", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:80", "127.0.0.9:1"],
)
def test_names_of_this_machine(host):
    app, _ = make_server(host="127.0.0.9")
    assert post(app, CHAT, ASK, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["", "localhost.evil.example", "evil.example:localhost", "::2", "[x"]
)
def test_names_that_only_look_like_it(host):
    app, _ = make_server()
    error = refusal(post(app, CHAT, ASK, headers={"host": host}), 403)
    assert error["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "::1", "127.0.0.1"])
def test_every_loopback_address_is_guarded(host):
    app, _ = make_server(host=host)
    error = refusal(call(app, "GET", "/health", headers=EVIL), 403)
    assert error["code"] == "host_not_allowed"


def test_more_names():
    app, _ = make_server(allow_hosts=("llm.example:443", "Other.example", "[fe80::1]"))
    for host in ("llm.example", "other.example:8000", "[fe80::1]:9"):
        assert call(app, "GET", "/health", headers={"host": host}).status_code == 200
    refusal(call(app, "GET", "/health", headers=EVIL), 403)


@pytest.mark.parametrize(
    "settings",
    [{"api_keys": ("k",)}, {"host": "0.0.0.0"}, {"uds": "/tmp/s"}, {"allow_hosts": ("*",)}],
)
def test_servers_that_take_any_name(settings):
    """A page does not know the key, and cannot reach a Unix socket."""
    app, _ = make_server(**settings)
    assert call(app, "GET", "/health", headers=EVIL).status_code == 200


def test_a_client_without_the_header_is_no_browser():
    app, _ = make_server()

    async def run():
        connection = Connection(app, CHAT, ASK)
        await connection.task
        assert connection.status == 200

    asyncio.run(run())


@pytest.mark.parametrize("wrong", ["", "http://a.example", " a"])
def test_wrong_names_are_refused_at_the_start(wrong):
    with pytest.raises(ConfigError, match="--allow-host"):
        ServerSettings(allow_hosts=(wrong,))


def test_host_name():
    names = {"a": "a", "A:1": "a", "a:": "a", "[::1]:1": "::1", "::1": "::1", "a:b": "a:b"}
    assert {given: host_name(given) for given in names} == names
