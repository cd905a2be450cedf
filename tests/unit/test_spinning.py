"""CPU threads spin while the cores are free and sleep while other programs need them."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop.worker import spinning
from stoop.worker.spinning import IdleTeam, SpinControl, find_libgomp, num_cores, seconds_waited


class Machine:
    """A clock, a share of time that the stepping thread waits for a core, and teams."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0
        self.num_teams = 0

    def make_team(self) -> "Machine":
        self.num_teams += 1
        return self

    def end(self) -> None:
        self.num_teams -= 1

    def run(self, control: SpinControl, seconds: float, share: float, step: float = 0.02) -> None:
        """Steps for so long."""
        for _ in range(round(seconds / step)):
            self.now += step
            self.waited += share * step
            control.note_step()


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def control(machine: Machine) -> SpinControl:
    return SpinControl(machine.make_team, lambda: machine.waited, lambda: machine.now)


def test_threads_sleep_at_first_and_spin_on_an_idle_machine(
    machine: Machine, control: SpinControl
) -> None:
    assert not control.spins and machine.num_teams == 1
    machine.run(control, 0.2, share=0.0)
    assert not control.spins, "too early to tell"
    machine.run(control, 0.2, share=0.0)
    assert control.spins and machine.num_teams == 0
    machine.run(control, 60, share=0.0)
    assert control.spins and not control.busy


def test_threads_sleep_while_others_need_the_cores(
    machine: Machine, control: SpinControl, caplog: pytest.LogCaptureFixture
) -> None:
    machine.run(control, 1, share=0.0)
    machine.run(control, 0.7, share=0.5)
    assert not control.spins and control.busy and machine.num_teams == 1
    machine.run(control, 20, share=0.3)
    assert not control.spins and machine.num_teams == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert "OMP_WAIT_POLICY" in line
    machine.run(control, 6, share=0.0)
    assert control.spins and machine.num_teams == 0


def test_every_failure_makes_the_next_try_later(machine: Machine, control: SpinControl) -> None:
    pauses = []
    machine.run(control, 1, share=0.0)
    for _ in range(8):
        machine.run(control, 0.7, share=0.5)
        assert not control.spins
        began = machine.now
        while not control.spins:
            machine.run(control, 0.1, share=0.0)
        pauses.append(machine.now - began)
    assert pauses[:4] == sorted(pauses[:4]) and pauses[0] < 6
    assert all(50 < pause < spinning.LONGEST_PAUSE + 2 for pause in pauses[5:])
    machine.run(control, 2 * spinning.LONGEST_PAUSE, share=0.0)  # a quiet while
    machine.run(control, 0.7, share=0.5)
    machine.run(control, 6, share=0.0)
    assert control.spins


def test_between_idle_and_busy_nothing_changes(machine: Machine, control: SpinControl) -> None:
    machine.run(control, 5, share=0.03)
    assert not control.spins and not control.busy
    machine.run(control, 1, share=0.0)
    machine.run(control, 5, share=0.03)
    assert control.spins


def test_one_long_step_is_enough(machine: Machine, control: SpinControl) -> None:
    machine.run(control, 1, share=0.0)
    machine.run(control, 3, share=0.6, step=3)
    assert not control.spins


def test_what_another_thread_waited_is_not_counted(machine: Machine, control: SpinControl) -> None:
    machine.run(control, 1, share=0.0)
    thread = threading.Thread(target=machine.run, args=(control, 0.32, 0.9))
    thread.start()
    thread.join()
    assert control.spins, "its window began on this thread"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_environment_decides_where_it_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert spinning.share_cores() is None


@pytest.mark.skipif(find_libgomp() is None, reason="torch uses another OpenMP library here")
def test_an_idle_team_comes_and_goes() -> None:
    def num_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    torch.ones(8).sum()
    before = num_threads()
    team = IdleTeam(find_libgomp())
    assert num_threads() == before + 1 + num_cores()  # its leader, and one more than the cores
    team.end()
    deadline = time.monotonic() + 10  # its threads take a moment to go
    while num_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_threads() == before


def test_waiting_is_read_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = seconds_waited()
    assert waited is None or waited >= 0
    monkeypatch.setattr(Path, "read_text", lambda *a, **k: "nonsense")
    assert seconds_waited() is None
    assert find_libgomp() is None


def test_an_engine_on_a_cpu_is_watched(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoop import LLM, SamplingParams

    noted = []

    class Watch:
        busy = False

        def note_step(self) -> None:
            noted.append(1)

    monkeypatch.setattr("stoop.engine.uniproc.share_cores", Watch)
    llm = LLM(str(checkpoints.get("llama2")), device="cpu", skip_tokenizer_init=True)
    llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(noted) == llm.metrics()["num_steps"] == 5
