"""Finds the transformers class of a config.json: the one that `architectures` names."""

from typing import Any, Final

import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from zinfer.errors import ConfigError

_ENCODER_DECODERS: Final[tuple[Any, ...]] = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
_DECODERS: Final[tuple[Any, ...]] = (MODEL_FOR_CAUSAL_LM_MAPPING,)
# Masked language models first: the causal classes of such families are decoder variants, which few checkpoints hold.
_OTHERS: Final[tuple[Any, ...]] = (MODEL_FOR_MASKED_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)


def find_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that ``config.architectures`` names, or the family's usual one if it names none.

    A name that transformers does not know is often a variant of the family's causal language model, which is then used
    instead; matching the weights shows whether it fits.

    Raises:
        ConfigError: transformers has no class for it.
    """
    names = list(config.architectures or ())
    for name in names:
        named: Any = getattr(transformers, name, None)
        is_model = isinstance(named, type) and issubclass(named, PreTrainedModel)
        if is_model and isinstance(config, named.config_class or ()):
            found: type[PreTrainedModel] = named
            return found
    if names:
        mappings = () if config.is_encoder_decoder else _DECODERS
    else:
        mappings = _ENCODER_DECODERS if config.is_encoder_decoder else _OTHERS
    for mapping in mappings:
        if type(config) in mapping:
            usual: Any = mapping[type(config)]
            found = usual[0] if isinstance(usual, tuple) else usual
            return found
    stated = f"architectures names {', '.join(names)}" if names else "architectures names no class"
    raise ConfigError(f"{stated}, and there is none for a {config.model_type} model; name one that transformers has")
