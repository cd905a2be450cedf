"""The order of a step, in one place."""

from collections.abc import Mapping
from dataclasses import replace

from stoop.graph.phases import HostCall, Phase
from stoop.spec.base import Speculator
from stoop.worker.target import Target


def step_phases(
    target: Target, speculator: Speculator | None, host_calls: Mapping[str, HostCall]
) -> list[Phase]:
    """I C V U, then the drafter's: P and D of an EAGLE head, N of prompt lookup.

    host_calls: by phase, what the host does right before it; graphs are cut there
    """
    phases = target.phases()
    if speculator is not None:
        phases += speculator.phases()
    names = [phase.name for phase in phases]
    assert len(set(names)) == len(names), f"two phases of one name among {names}"
    lanes = [id(phase.lane) for phase in phases if phase.lane is not None]
    assert len(set(lanes)) == len(lanes), "a lane serves one phase"
    assert host_calls.keys() <= set(names), f"host calls before {[*host_calls]}, phases {names}"
    assert all(len(name) == 1 for name in names), f"a phase is named by one letter: {names}"
    return [replace(phase, host_call=host_calls.get(phase.name)) for phase in phases]
