"""From a speculative configuration to its drafter."""

from stoop.checkpoint.report import Report
from stoop.models.base import Model
from stoop.models.head_loader import load_head
from stoop.spec.base import DraftSetup, Speculator
from stoop.spec.eagle import EagleSpeculator
from stoop.spec.ngram import NgramSpeculator


def make_speculator(setup: DraftSetup, target: Model, report: Report | None = None) -> Speculator:
    config = setup.config
    assert config.spec is not None
    if config.spec.head is None:
        return NgramSpeculator(setup)
    head = load_head(
        config.spec.head,
        config.spec.folder,
        device=config.device,
        target=target,
        num_positions=config.schedule.max_model_len,
        dummy_seed=config.load.seed if config.load.dummy else None,
        report=report,
    )
    return EagleSpeculator(setup, head)
