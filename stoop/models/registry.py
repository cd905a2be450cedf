"""Architecture names to model classes."""

from stoop.config.schema import ModelSpec
from stoop.models.hf_config import ARCHITECTURES
from stoop.models.llama import LlamaModel

MODELS: dict[str, type[LlamaModel]] = dict.fromkeys(ARCHITECTURES, LlamaModel)


def model_class(spec: ModelSpec) -> type[LlamaModel]:
    return MODELS[spec.architecture]
