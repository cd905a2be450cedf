"""CPU threads spin while the cores are free and sleep while other programs need them."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop.ops.native import library
from stoop.worker import core_usage, spinning
from stoop.worker.core_usage import CoreSeconds, ThreadLimit, num_cores, seconds_used
from stoop.worker.spinning import IdleTeam, SpinControl, find_libgomp, seconds_waited


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
            control.note_start()
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


def rest(machine: Machine, control: SpinControl, seconds: float, waited: float = 0.0) -> None:
    control.note_idle()
    machine.now += seconds
    machine.waited += waited


def test_time_between_requests_is_no_time_of_steps(machine: Machine, control: SpinControl) -> None:
    """Or a thread that waited in every step would seem to have waited rarely."""
    for _ in range(3):
        assert not control.busy
        rest(machine, control, 30)
        machine.run(control, 0.14, share=0.5)
    assert control.busy and not control.spins


def test_what_the_caller_waits_between_requests_does_not_count(
    machine: Machine, control: SpinControl
) -> None:
    """The thread may have work of its own there, beside other programs."""
    control.note_loaded()
    for _ in range(20):
        rest(machine, control, 30, waited=20)
        machine.run(control, 0.14, share=0.0)
        assert not control.busy
    assert control.spins


def test_waits_for_grammars_are_no_steps(machine: Machine, control: SpinControl) -> None:
    """Such a turn of the loop launches nothing."""
    machine.run(control, 1, share=0.0)
    for _ in range(4):
        rest(machine, control, 3)
        control.note_step()
        machine.run(control, 0.12, share=0.5)
        control.note_idle()
    assert control.busy and not control.spins


def test_after_loading_a_short_window_decides(machine: Machine, control: SpinControl) -> None:
    control.note_loaded()
    machine.run(control, 0.12, share=0.0)
    assert control.spins
    machine.run(control, 0.2, share=0.5)
    assert control.spins, "the second one is longer"
    machine.run(control, 0.2, share=0.5)
    assert not control.spins


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
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    torch.ones(8).sum()
    before = threads()  # those of earlier tests may end at any time
    team = IdleTeam(find_libgomp())
    its = threads() - before
    assert len(its) == 1 + num_cores()  # its leader, and one more than the cores
    team.end()
    deadline = time.monotonic() + 10  # its threads take a moment to go
    while its & threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not its & threads()


def test_waiting_is_read_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = seconds_waited()
    assert waited is None or waited >= 0
    monkeypatch.setattr(Path, "read_text", lambda *a, **k: "nonsense")
    assert seconds_waited() is None
    assert find_libgomp() is None


def test_an_engine_on_a_cpu_is_watched(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoop import LLM, SamplingParams

    noted = []
    asked = []

    class Watch:
        busy = False

        def __init__(self, fixed_threads: bool) -> None:
            asked.append(fixed_threads)

        def note_loaded(self) -> None:
            assert not noted

        def note_start(self) -> None:
            assert len(started) == len(noted)
            started.append(1)

        def note_step(self) -> None:
            noted.append(1)

        def note_idle(self) -> None:
            idle.append(len(noted))

    idle: list[int] = []
    started: list[int] = []
    monkeypatch.setattr("stoop.engine.uniproc.share_cores", Watch)
    llm = LLM(str(checkpoints.get("llama2")), device="cpu", skip_tokenizer_init=True)
    llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(noted) == llm.metrics()["num_steps"] == 5
    assert idle == [5], "after the last step"
    noted.clear()
    started.clear()
    LLM(str(checkpoints.get("llama2")), device="cpu", skip_tokenizer_init=True, num_threads=2)
    assert asked == [False, True]


class Cores:
    """Seconds that cores were busy, and what of that was this process."""

    def __init__(self, num_cores: int, most: int | None = None) -> None:
        self.used = self.own = self.after = 0.0
        self.asked: list[int] = []
        self.limit = ThreadLimit(
            self.asked.append,
            num_cores,
            most or num_cores,
            lambda: CoreSeconds(self.used, self.after),
            lambda: self.own,
        )

    def window(
        self,
        own: float,
        others: float,
        waits: bool | float,
        loading: bool = False,
        nice: float = 0.0,
    ) -> int:
        """Half a second in which so many cores were used. waits: or for what share"""
        self.limit.begin()
        self.own += 0.5 * own
        self.used += 0.5 * (own + others)
        self.after += 0.5 * nice
        waited = 0.1 * waits if isinstance(waits, bool) else waits
        self.limit.decide(0.5, waited, loading=loading)
        return self.limit.threads


def test_a_busy_machine_gets_as_many_threads_as_it_has_free_cores() -> None:
    cores = Cores(2)
    assert cores.window(own=2.0, others=0.0, waits=False) == 2
    assert cores.window(own=1.0, others=1.0, waits=True) == 1  # beside programs that never rest
    assert cores.limit.lowered and cores.asked == [2, 1]
    assert cores.window(own=1.0, others=1.0, waits=False) == 1, "the other core is not free"
    assert cores.window(own=0.5, others=1.5, waits=True) == 1, "never none"
    assert cores.window(own=1.0, others=0.4, waits=False) == 1, "little of it is"
    assert cores.window(own=1.0, others=0.1, waits=False) == 2
    assert not cores.limit.lowered and cores.asked == [2, 1, 2]


def test_there_are_few_numbers_of_threads() -> None:
    """Each has threads and memory of its own: all, half, a quarter and so on."""
    cores = Cores(8)
    assert cores.window(own=4.0, others=4.0, waits=False) == 8, "nothing waits"
    assert cores.window(own=7.0, others=0.4, waits=True) == 8
    assert cores.window(own=7.0, others=1.0, waits=True) == 4
    assert cores.window(own=1.0, others=7.5, waits=True) == 1
    assert cores.window(own=1.0, others=5.5, waits=False) == 2
    assert cores.window(own=2.0, others=2.0, waits=False) == 4
    assert cores.window(own=4.0, others=0.3, waits=False) == 4, "not all of the eighth is free"
    assert cores.window(own=6.0, others=-0.2, waits=False) == 8  # clocks of different resolution
    assert cores.asked == [8, 4, 1, 2, 4, 8]


def test_threads_that_torch_does_not_use_count_for_nothing() -> None:
    """As with two threads for every core: others may have what we leave."""
    cores = Cores(64, most=32)
    assert cores.window(own=1.0, others=20.0, waits=True) == 32 and not cores.limit.lowered
    assert cores.window(own=1.0, others=40.0, waits=True) == 16 and cores.limit.lowered


def test_a_container_has_a_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    found = []
    for text in ("max 100000", "250000 100000", "50000 100000", "nonsense"):
        file.write_text(text + "\n")
        found.append(core_usage.quota_cores(file))
    assert found == [None, 2.5, 0.5, None] and core_usage.quota_cores(tmp_path / "no") is None
    for quota, threads in ((None, 8), (2.5, 3), (0.5, 1), (64.0, 8)):
        monkeypatch.setattr(core_usage, "quota_cores", lambda quota=quota: quota)
        assert core_usage.most_threads(8) == threads


def test_programs_that_give_way_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, second = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    cores = sorted(os.sched_getaffinity(0))
    lines = [f"cpu{core} {3 * second} {5 * second} {second} 9 9 0 0 0" for core in cores]
    stat.write_text("\n".join(["cpu 1 1 1 1 1 1 1 1", *lines, "intr 5"]))
    for priority, expected in ((0, (4.0, 5.0)), (10, (9.0, 0.0))):
        monkeypatch.setattr(os, "getpriority", lambda which, who, value=priority: value)
        found = core_usage.core_seconds(stat)
        assert found is not None  # unless we give way, too
        assert found == tuple(len(cores) * seconds for seconds in expected)


def test_programs_that_give_way_cost_no_threads() -> None:
    cores = Cores(2)
    for waited in (0.0, 0.06, 0.2):
        assert cores.window(own=2.0, others=0.0, waits=waited, nice=2.0) == 2


def test_programs_of_low_priority_that_hold_their_cores_count() -> None:
    """Those of another session: Linux shares the cores between sessions first."""
    cores = Cores(2)
    assert cores.window(own=1.0, others=0.0, waits=0.5, nice=1.0) == 1
    for _ in range(7):
        assert cores.window(own=1.0, others=0.0, waits=0.01, nice=1.0) == 1
    assert cores.window(own=1.0, others=0.0, waits=0.01, nice=1.0) == 2, "tried again after 4 s"
    assert cores.window(own=1.0, others=0.0, waits=0.5, nice=1.0) == 1
    slow = [cores.window(own=1.0, others=0.0, waits=0.01, nice=1.0) for _ in range(16)]
    assert slow == [1] * 15 + [2], "after 8 s"
    assert cores.window(own=1.0, others=0.0, waits=0.5, nice=1.0) == 1
    assert cores.window(own=1.0, others=0.0, waits=0.0) == 2, "gone"
    assert cores.window(own=1.0, others=0.0, waits=0.5, nice=1.0) == 1
    slow = [cores.window(own=1.0, others=0.0, waits=0.01, nice=1.0) for _ in range(8)]
    assert slow == [1] * 7 + [2], "forgotten"


def test_what_others_explain_is_no_doubt() -> None:
    """Programs of our priority make the thread wait; those of low priority may give way."""
    cores = Cores(16)
    assert cores.window(own=8.0, others=8.0, waits=0.4, nice=7.0) == 8
    assert cores.window(own=8.0, others=8.0, waits=0.1, nice=0.5) == 8
    few = Cores(2)
    for _ in range(3):
        assert few.window(own=1.7, others=0.3, waits=0.3, nice=0.5) == 2
    assert few.window(own=1.7, others=0.2, waits=0.3, nice=0.5) == 1, "too little to explain it"


def test_what_others_use_is_read_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    before, own = seconds_used(), time.process_time()
    assert before is not None
    while time.process_time() < own + 0.2:
        pass
    after = seconds_used()
    assert after is not None and after - before >= 0.1
    monkeypatch.setattr(Path, "read_text", lambda *a, **k: "cpu0 nonsense")
    assert seconds_used() is None
    cores = Cores(2)
    cores.limit = ThreadLimit(cores.asked.append, 2, 2)
    cores.limit.decide(0.5, 0.5)
    assert cores.limit.threads == 2


def test_the_busy_control_limits_the_threads(machine: Machine, control: SpinControl) -> None:
    cores = Cores(2)
    control.limit = cores.limit
    for _ in range(100):
        cores.used += 0.01  # one core, all of it by others
        machine.run(control, 0.01, share=0.5, step=0.01)
    assert cores.limit.threads == 1 and control.busy
    machine.run(control, 5, share=0.0)
    assert cores.limit.threads == 2 and not control.busy


def test_a_pause_changes_no_number_of_threads(machine: Machine, control: SpinControl) -> None:
    """Another program that runs only while requests do, such as one that asks them."""
    cores = Cores(2)
    control.limit = cores.limit

    def serve(seconds: float) -> None:
        for _ in range(round(seconds / 0.01)):
            cores.used += 0.02  # one core each
            cores.own += 0.01
            machine.run(control, 0.01, share=0.5 * (cores.limit.threads == 2), step=0.01)

    serve(1)
    assert cores.limit.threads == 1
    for _ in range(5):
        rest(machine, control, 60)
        serve(0.8)
    assert cores.asked == [2, 1]
    rest(machine, control, 60)
    machine.run(control, 1, share=0.0)
    assert cores.asked == [2, 1, 2], "the other one is gone"
    for _ in range(5):
        rest(machine, control, 5)
        cores.used += 10  # programs that run in pauses only
        machine.run(control, 0.8, share=0.1)
    assert cores.asked == [2, 1, 2]


def test_a_model_that_is_loaded_beside_others_starts_with_fewer_threads(
    machine: Machine, control: SpinControl
) -> None:
    """If they use half of the cores, or the loading thread waits."""
    cores = Cores(2)
    control.limit = cores.limit
    cores.used, machine.now = 0.1, 0.1
    control.note_loaded()
    assert cores.limit.threads == 2, "too early to tell"
    cores.used, machine.now = 1.0, 1.0
    control.note_loaded()
    assert cores.limit.threads == 1
    many = Cores(64)
    assert many.window(own=1.0, others=2.0, waits=False, loading=True) == 64
    assert many.window(own=1.0, others=40.0, waits=False, loading=True) == 16
    control.limit, machine.waited, machine.now = many.limit, 0.5, 2.0
    many.window(own=1.0, others=0.0, waits=False)
    many.used += 2.0
    control.note_loaded()
    assert many.limit.threads == 32


def test_the_limit_is_judged_whichever_thread_steps(machine: Machine, control: SpinControl) -> None:
    """Short requests of several threads: no window begins and ends on the same one."""
    cores = Cores(2)
    control.limit = cores.limit
    assert cores.window(own=1.0, others=1.0, waits=True) == 1
    for _ in range(3):
        stepping = threading.Thread(target=machine.run, args=(control, 0.4, 0.0))
        stepping.start()
        stepping.join()
    assert cores.limit.threads == 2


@pytest.mark.parametrize("chosen", ["option", "environment", "neither"])
def test_a_number_of_threads_that_the_user_chose_is_kept(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spinning, "_control", SpinControl(Machine().make_team))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    monkeypatch.setattr(library, "_most_threads", 1)  # another engine's
    if chosen == "environment":
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    control = spinning.share_cores(fixed_threads=chosen == "option")
    assert control is not None
    assert (control.limit is None) == (chosen != "neither")
    most = core_usage.most_threads(torch.get_num_threads())
    assert library._most_threads == (most if chosen == "neither" else None)


def test_the_limit_chooses_the_team(monkeypatch: pytest.MonkeyPatch) -> None:
    native = library.find_native()
    if native is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(library, "_most_threads", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    both = native.team
    library.limit_threads(1)
    assert native.team != both and native.team == native._teams[1]
    library.limit_threads(3)
    assert native.team == both


def test_threads_that_cannot_be_started_are_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native = library.find_native()
    if native is None:
        pytest.skip("no C++ compiler")
    real, asked = native._library.stoop_start, []

    class Full:
        """A container with room for no more threads."""

        stoop_spin = native._library.stoop_spin

        def stoop_start(self, num_threads: int) -> int | None:
            asked.append(num_threads)
            return real(num_threads) if num_threads == 1 else None

    monkeypatch.setattr(native, "_library", Full())
    monkeypatch.setattr(native, "_teams", {})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    assert native.team == native.team and asked == [12, 1]
    assert "12 CPU threads cannot be started" in caplog.text
