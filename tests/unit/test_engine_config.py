"""What the options of an engine become on each device."""

from typing import Any

import pytest

from stoop.config.errors import ConfigError
from stoop.config.resolve import make_options, resolve
from support.specs import tiny_spec


def resolved(device: str, **options: Any) -> Any:
    return resolve(make_options("x", options), tiny_spec(), "folder", device)


@pytest.mark.parametrize(("device", "ahead", "mode"), [("cpu", 0, "none"), ("cuda:0", 1, "step")])
def test_defaults(device: str, ahead: int, mode: str) -> None:
    config = resolved(device)
    assert (config.schedule.run_ahead, config.graph.mode) == (ahead, mode)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("ahead", [0, 1, 2, 8])
def test_steps_to_run_ahead_are_taken_as_asked(device: str, ahead: int) -> None:
    assert resolved(device, run_ahead=ahead).schedule.run_ahead == ahead
    assert resolved(device, run_ahead=ahead, graph_mode="full").graph.mode == "full"


@pytest.mark.parametrize("backend", ["auto", "flashinfer"])
@pytest.mark.parametrize("ahead", [-1, 9, True, False, "2", 1.0])
def test_no_other_number_of_steps(backend: str, ahead: Any) -> None:
    with pytest.raises(ConfigError, match="run_ahead="):
        resolved("cuda:0", run_ahead=ahead, attention_backend=backend)


@pytest.mark.parametrize("asked", [{}, {"run_ahead": None}, {"run_ahead": 0}])
def test_a_backend_that_plans_from_results_does_not_run_ahead(asked: dict[str, Any]) -> None:
    options = {"attention_backend": "flashinfer", "dtype": "bfloat16"}
    assert resolved("cuda:0", **options, **asked).schedule.run_ahead == 0
    with pytest.raises(ConfigError, match="use run_ahead=0 or another backend"):
        resolved("cuda:0", **options, run_ahead=1)


def test_sanitizing_needs_graphs_that_auto_may_not_give() -> None:
    assert resolved("cuda:0", sanitize=True).graph.sanitize
    with pytest.raises(ConfigError, match="choose a mode"):
        resolved("cpu", sanitize=True)
