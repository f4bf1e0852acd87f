"""Post-training quantization, in place, of a module whose weights are in memory."""

from typing import Literal, TypeVar

from torch import nn

from zinfer.config.quantization_rules import Quantization, QuantizationType, QuantRule
from zinfer.errors import CheckpointError, ConfigError
from zinfer.kernels.quantize import CannotQuantize, quantize
from zinfer.model.quantized_forms import find_form
from zinfer.weights.parameter import QuantizedParameter
from zinfer.weights.slab_matrix import SlabMatrix

Model = TypeVar("Model", bound=nn.Module)


def quantize_transformer(
    model: Model,
    quant_bits: Literal[4, 8] = 8,
    quant_type: str = QuantizationType.SYMMETRIC,
    quant_groups: int | None = None,
) -> Model:
    """Replace the matrices of a model's layers by quantized ones; its forward stays the same.

    Each matrix is freed once it is quantized. Embeddings, norms, heads and routers stay in full precision.

    Args:
        model: changed in place, and returned; on any device.
        quant_bits: 4 or 8.
        quant_type: "symmetric", or "asymmetric" with zero points; or a `QuantizationType`.
        quant_groups: number of equal groups of each matrix, in row order, with a scale each; None: one group per
            output channel.

    Raises:
        ConfigError: an argument is invalid, or a matrix cannot be divided into so many groups.
        CheckpointError: a weight is infinite or NaN; names it.
    """
    if quant_bits not in (4, 8):
        raise ConfigError(f"quant_bits must be 4 or 8, not {quant_bits}")
    if quant_type not in tuple(QuantizationType):
        raise ConfigError(f'quant_type must be "symmetric" or "asymmetric", not {quant_type!r}')
    if quant_groups is not None and quant_groups < 1:
        raise ConfigError(f"quant_groups must be at least 1, not {quant_groups}")
    symmetric = quant_type == QuantizationType.SYMMETRIC
    rule = QuantRule(bits=quant_bits, symmetric=symmetric, num_groups=quant_groups, origin="quant_groups")
    form = find_form(Quantization((rule,)))
    done: dict[nn.Parameter, QuantizedParameter] = {}
    for path, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or isinstance(parameter, QuantizedParameter):
                continue
            if parameter not in done:
                name = f"{path}.{leaf}".lstrip(".")
                place = form(name, module, parameter)
                if not isinstance(place, SlabMatrix):
                    continue
                weight = parameter.detach()
                weight = weight.t() if place.transposed else weight.view(place.rows, place.columns)
                try:
                    matrix = quantize(weight, place.format)
                except CannotQuantize as error:
                    raise CheckpointError(f"{name} cannot be quantized: {error}") from error
                done[parameter] = QuantizedParameter.make(matrix, place.shape, transposed=place.transposed)
            module._parameters[leaf] = done[parameter]
    return model
