"""As deepspeed.ops.transformer.inference."""

from zinfer.compat.inference import (
    Config,
    DeepSpeedInferenceConfig,
    DeepSpeedTransformerInference,
    QuantizationConfig,
    QuantizationType,
    quantize_transformer,
)

__all__ = [
    "Config",
    "DeepSpeedInferenceConfig",
    "DeepSpeedTransformerInference",
    "QuantizationConfig",
    "QuantizationType",
    "quantize_transformer",
]
