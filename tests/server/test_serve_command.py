"""The command itself: flags, refusals, warnings."""

import sys

import pytest
from typer.testing import CliRunner

from stoop.cli import serve as command
from stoop.cli.main import app
from stoop.config.errors import ConfigError
from stoop.server import run
from stoop.server.settings import ServerSettings


class Started(Exception):
    """Instead of a server."""


@pytest.fixture
def started(monkeypatch):
    """The settings that the command would serve with."""
    seen = []

    def stop(module, settings, model, engine, tell):
        seen.append((settings, model, engine))
        return 0

    monkeypatch.setattr(command, "_run", stop)
    monkeypatch.setattr(command, "_set_up_request_log", lambda: None)
    monkeypatch.delenv("STOOP_API_KEY", raising=False)
    return seen


def invoke(*flags):
    return CliRunner().invoke(app, ["serve", *flags], catch_exceptions=False)


def test_defaults(started):
    assert invoke().exit_code == 0
    ((settings, model, engine),) = started
    assert model == "smollm2-135m" and settings.model_names == ("smollm2-135m",)
    assert settings == ServerSettings(model_names=("smollm2-135m",))
    assert settings.loopback and engine["speculative_config"] == "auto"


def test_flags(started, monkeypatch, tmp_path):
    monkeypatch.setenv("STOOP_API_KEY", "three")
    folder = tmp_path / "my-model"
    folder.mkdir()
    invoke(
        str(folder), "--host", "0.0.0.0", "--port", "0", "--api-key", "one", "--api-key", "two",
        "--allow-origin", "*", "--max-queue", "7", "--request-timeout", "1.5", "--log-prompts",
        "--no-log-requests", "--metrics-names", "vllm", "--max-model-len", "128",
    )  # fmt: skip
    ((settings, _, engine),) = started
    assert settings.model_names == ("my-model", str(folder))
    assert settings.api_keys == ("one", "two", "three")
    assert (settings.host, settings.port, settings.max_queue) == ("0.0.0.0", 0, 7)
    assert settings.allow_origins == ("*",) and settings.request_timeout == 1.5
    assert settings.log_prompts and not settings.log_requests
    assert not settings.loopback and engine["max_model_len"] == 128
    started.clear()
    invoke(str(folder), "--served-model-name", "a", "--served-model-name", "b")
    assert started[0][0].model_names == ("a", "b")


def test_bad_values_are_refused_before_anything_starts(started):
    for flags, text in (
        (("--tool-call-parser", "x"), "--tool-call-parser 'x': use auto, hermes"),
        (("--max-body-bytes", "0"), "--max-body-bytes 0: use at least 1"),
        (("--block-size", "0"), "block_size"),
    ):
        with pytest.raises(ConfigError, match=text):
            invoke(*flags)
    assert not started


def test_missing_packages_are_one_sentence(started, monkeypatch):
    monkeypatch.delitem(sys.modules, "stoop.server.run")
    monkeypatch.delattr("stoop.server.run")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"needs uvicorn: .* pip install 'stoop\[serve\]'"):
        invoke()


def test_an_open_address_without_a_key_is_told(monkeypatch, capsys):
    def stop(settings):
        raise Started

    monkeypatch.setattr(run, "open_socket", stop)
    for settings, told in (
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_keys": ("k",)}, False),
        ({}, False),
    ):
        with pytest.raises(Started):
            command._run(run, ServerSettings(model_names=("m",), **settings), "m", {})
        assert ("no --api-key" in capsys.readouterr().err) == told


def test_sockets(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        run.open_socket(ServerSettings(uds=str(file)))
    path = str(tmp_path / "socket")
    first = run.open_socket(ServerSettings(uds=path))
    with pytest.raises(ConfigError, match="is in use"):
        run.open_socket(ServerSettings(uds=path))
    first.close()  # as after a crash: the file is left
    run.open_socket(ServerSettings(uds=path)).close()
    with pytest.raises(ConfigError, match="--host"):
        run.open_socket(ServerSettings(host="no.such.host.invalid", port=0))
