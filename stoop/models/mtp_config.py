"""Finds the MTP head in a model's own folder, and checks its tensors."""

import logging
from pathlib import Path

from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError, ConfigError
from stoop.config.schema import ModelSpec
from stoop.models.decoder import DecoderSpec
from stoop.models.kv_scales import without_scales
from stoop.models.loader import check_names, check_shape, on_meta
from stoop.models.mtp import MtpHead, MtpSpec
from stoop.models.registry import find_family

logger = logging.getLogger(__name__)

_INSTEAD = 'name an EAGLE head, or use {"method": "ngram"}'


def read_mtp_spec(folder: Path, target: ModelSpec, dummy: bool = False) -> MtpSpec:
    """The spec of the MTP head in the model's folder.

    dummy: the weights will be random, so that config.json decides and none are read
    """
    if not isinstance(target, DecoderSpec) or find_family(target.architecture).build_mtp is None:
        raise ConfigError(f"stoop has no MTP heads for {target.architecture}: {_INSTEAD}")
    if target.num_mtp_layers > 1:
        raise ConfigError(
            f"the model's MTP head has {target.num_mtp_layers} layers, and stoop drafts with heads "
            f"of one layer only: {_INSTEAD}"
        )
    if dummy and not target.num_mtp_layers:
        raise ConfigError(f"config.json of {folder} has no MTP layers: {_INSTEAD}")
    spec = MtpSpec(target)
    if not dummy:
        _check_tensors(folder, spec)
    logger.info("MTP head of %s: one layer, the target's embedding and LM head", folder)
    return spec


def has_mtp_head(folder: Path, target: ModelSpec, dummy: bool = False) -> bool:
    """Whether the model has an MTP head that stoop can draft with. dummy: see `read_mtp_spec`"""
    try:
        read_mtp_spec(folder, target, dummy)
    except ConfigError:
        return False
    except CheckpointError as error:
        logger.info("the model's MTP head is not used: %s", error)
        return False
    return True


def build_mtp(spec: MtpSpec) -> MtpHead:
    """A head with unfilled weights, of the family's own class."""
    family = find_family(spec.target.architecture)
    assert family.build_mtp is not None, spec
    return family.build_mtp(spec)


def mtp_names(head: MtpHead, reader: WeightReader) -> dict[str, str]:
    """The names of the head's tensors in a checkpoint, each mapped to itself."""
    return {name: name for name in reader.names() if name.startswith(head.prefix)}


def _check_tensors(folder: Path, spec: MtpSpec) -> None:
    """Refuse tensors that are not exactly those of the spec."""
    head = on_meta(lambda: build_mtp(spec))
    with WeightReader(folder) as reader:
        found = {name: reader.shape(name) for name in without_scales(mtp_names(head, reader))}
    if not found:
        raise ConfigError(
            f"the weights in {folder} have no MTP head (no tensor is called {head.prefix}*): fetch "
            f"them from the model's maker, {_INSTEAD}"
        )
    wanted = {view.name: view.shape for view in head.weight_views()}
    check_names(wanted.keys(), found.keys(), "the MTP head")
    for name, shape in wanted.items():
        check_shape(name, found[name], shape)
