"""Models whose blocks are not used in order and once a pass."""

from typing import Any

import torch
from checkpoints import MATRIX_STD, VOCAB_SIZE
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

WIDTH = 32


class OddConfig(PretrainedConfig):
    """``order``: of the layers in a pass, by number; None leaves it to the input."""

    model_type = "odd"

    def __init__(
        self, order: list[int] | None = None, num_layers: int = 5, shares: str = "nothing", **kwargs: Any
    ) -> None:
        self.order = order
        self.num_layers = num_layers
        self.shares = shares
        super().__init__(**kwargs)


class OddLayer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixer = mixer
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.last(torch.tanh(self.mixer(self.norm(hidden)))))


class OddModel(PreTrainedModel):
    """Layers that may share ``mixer``, a module, or ``weight``, a parameter, and a scale of the model's own."""

    config_class = OddConfig
    base_model_prefix = "odd"

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        common = self._mixer()
        mixers = [common if config.shares == "module" else self._mixer() for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(OddLayer(mixer) for mixer in mixers)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)
        if config.shares == "weight":
            self._tied_weights_keys = {
                f"layers.{number}.last.weight": "layers.0.last.weight" for number in range(1, config.num_layers)
            }
            config.tie_word_embeddings = True
        self.post_init()

    @staticmethod
    def _mixer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> BaseModelOutput:
        hidden = self.embed(input_ids)
        for number in self.config.order or self._order(input_ids):
            hidden = self.layers[number](hidden) * self.scale
        return BaseModelOutput(last_hidden_state=self.head(hidden))

    def _order(self, input_ids: torch.Tensor) -> list[int]:
        """As the input has it: some layers twice, some not at all."""
        return [int(token) % self.config.num_layers for token in input_ids[0]]


def odd_model(**config: Any) -> OddModel:
    torch.manual_seed(0)
    model = OddModel(OddConfig(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.ndim > 1 else 1.0, MATRIX_STD)
    return model
