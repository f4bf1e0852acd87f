"""What follows the token vectors of an embedding model: pooling, dense layers and normalization.

A sentence-transformers checkpoint names them in `modules.json`, its prompts in `config_sentence_transformers.json` and
its longest text in `sentence_bert_config.json`; the results are those of `SentenceTransformer.encode`. A folder without
`modules.json` gets the mean of its tokens, with length 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from zinfer.errors import CheckpointError, ConfigError
from zinfer.jobs.request import Pooling
from zinfer.requests.length_limits import LengthLimits, Limit
from zinfer.weights.checkpoint import read_config
from zinfer.weights.folder import check_file_name, shorten, unreadable
from zinfer.weights.header import JsonFault, parse_object

MODULES_NAME: Final = "modules.json"
PROMPTS_NAME: Final = "config_sentence_transformers.json"
LENGTH_NAME: Final = "sentence_bert_config.json"
_MODES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of a Pooling's config.json, in the order in which several are joined; and the names that newer ones give."""
_OWN: Final = {Pooling.MEAN: "mean", Pooling.CLS: "cls", Pooling.LAST: "lasttoken"}
_ACTIVATIONS: Final = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU")
_DOWNLOAD: Final = "download it again"


@dataclass(frozen=True)
class EmbeddingHead:
    """Computes one vector a row from its token vectors.

    Attributes:
        modes: of pooling, whose results are joined.
        steps: that follow, each from [rows, width] to [rows, width].
        names: of the steps.
        prompts: texts that come before a row's text, by name.
        default_prompt: the text where none is named.
        source: the origin of the modes.
    """

    modes: tuple[str, ...] = ("mean",)
    steps: tuple[nn.Module, ...] = ()
    names: tuple[str, ...] = ("unit length",)
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    pools_prompt: bool = True
    source: str = f"no {MODULES_NAME}"

    @classmethod
    def read(cls, folder: Path, pooling: Pooling = Pooling.AUTO) -> "EmbeddingHead":
        """Read the head of a model's folder.

        Args:
            pooling: in place of the modes that the folder states.

        Raises:
            CheckpointError: a file cannot be read, or names a module that is not known here.
        """
        modes = None if pooling is Pooling.AUTO else (_OWN[pooling],)
        if (folder / MODULES_NAME).is_file():
            found = _read_modules(folder, modes)
        else:
            found = cls(modes or ("mean",), (_Normalize(),))
        return replace(found, source=found.source if modes is None else "as --pooling says", **_read_prompts(folder))

    def __str__(self) -> str:
        """What the head does, in a few words."""
        return ", then ".join(("+".join(self.modes), *self.names))

    def prompt(self, name: str | None) -> str:
        """Return the text that comes before each row's text.

        Raises:
            ConfigError: there is no such name, or the pooling leaves prompts out, which is not done here.
        """
        if name is not None and name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise ConfigError(
                f"prompt_name is {name!r:.60}, but the model's prompts are {known}; name one, or leave it out"
            )
        text = self.default_prompt if name is None else self.prompts[name]
        if text and not self.pools_prompt:
            raise ConfigError(
                "the checkpoint's pooling leaves out the tokens of a prompt (include_prompt is false), which is not "
                "supported; use another model"
            )
        return text

    def limits(self, limits: LengthLimits, folder: Path) -> LengthLimits:
        """Return the limits with the checkpoint's longest text, if that is shorter."""
        path = folder / LENGTH_NAME
        most = read_config(path).get("max_seq_length") if path.is_file() else None
        if type(most) is not int or most < 1 or (limits.prompt is not None and limits.prompt.max_tokens <= most):
            return limits
        return replace(limits, prompt=Limit(most, f"max_seq_length of {LENGTH_NAME}"))

    def __call__(self, hidden_RTW: torch.Tensor, mask_RT: torch.Tensor) -> torch.Tensor:
        """Return float32 vectors [rows, width] of hidden states whose padding is on the right."""
        hidden_RTW, mask_RT1 = hidden_RTW.float(), mask_RT.to(hidden_RTW.device)[..., None]
        vectors = torch.cat([_pooled(mode, hidden_RTW, mask_RT1) for mode in self.modes], dim=-1)
        for step in self.steps:
            vectors = step.to(vectors.device)(vectors)
        return vectors


def _pooled(mode: str, hidden_RTW: torch.Tensor, mask_RT1: torch.Tensor) -> torch.Tensor:
    if mode == "cls":
        return hidden_RTW[:, 0]
    if mode == "lasttoken":
        last_R = mask_RT1.sum(dim=1)[:, 0] - 1
        return hidden_RTW[torch.arange(len(last_R), device=last_R.device), last_R]
    if mode == "max":
        return hidden_RTW.masked_fill(mask_RT1 == 0, -torch.inf).amax(dim=1)
    known_RTW, counts_R1 = hidden_RTW.masked_fill(mask_RT1 == 0, 0), mask_RT1.sum(dim=1)
    if mode == "weightedmean":
        places_T1 = torch.arange(1, mask_RT1.shape[1] + 1, device=mask_RT1.device)[:, None]
        known_RTW, counts_R1 = known_RTW.mul_(places_T1), (mask_RT1 * places_T1).sum(dim=1)
    return known_RTW.sum(dim=1) / (counts_R1.sqrt() if mode == "mean_sqrt_len_tokens" else counts_R1)


class _Normalize(nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(vectors, dim=-1)


def _read_modules(folder: Path, stated_modes: tuple[str, ...] | None) -> EmbeddingHead:
    path = folder / MODULES_NAME
    kinds = [_module(path, number, each) for number, each in enumerate(_read_list(path))]
    if [kind for kind, _ in kinds[:2]] != ["Transformer", "Pooling"] or kinds[0][1] not in ("", "."):
        raise CheckpointError(
            f"{path}: begins with {', '.join(kind for kind, _ in kinds[:2])}, and only a Transformer in the folder "
            "itself, followed by a Pooling, is supported; state --pooling in a copy without modules.json"
        )
    pooling = _members(folder / kinds[1][1] / "config.json")
    modes = stated_modes or _read_modes(folder / kinds[1][1] / "config.json", pooling)
    pools_prompt = bool(pooling.get("include_prompt", True))
    steps: list[nn.Module] = []
    names: list[str] = []
    for kind, place in kinds[2:]:
        if kind == "Normalize":
            steps.append(_Normalize())
            names.append("unit length")
        elif kind == "Dense":
            dense, name = _read_dense(folder / place)
            steps.append(dense)
            names.append(name)
        elif kind != "Dropout":  # does nothing in inference
            raise CheckpointError(
                f"{path}: names a module {shorten(kind)}, which is not supported; known are Transformer, Pooling, "
                "Dense, Normalize and Dropout: use another model"
            )
    return EmbeddingHead(modes, tuple(steps), tuple(names), pools_prompt=pools_prompt, source=f"as {MODULES_NAME} says")


def _read_list(path: Path) -> list[Any]:
    try:
        found = parse_object(b'{"modules":' + path.read_bytes() + b"}", lenient=True)["modules"]
    except OSError as error:
        raise unreadable(path, error) from error
    except JsonFault as fault:
        raise CheckpointError(f"{path}: {fault}: {_DOWNLOAD}") from fault
    if not isinstance(found, list):
        raise CheckpointError(f"{path}: is no list of modules: {_DOWNLOAD}")
    return found


def _module(path: Path, number: int, entry: object) -> tuple[str, str]:
    """Return a module's class and its folder."""
    kind, place = (entry.get("type"), entry.get("path", "")) if isinstance(entry, Mapping) else (None, None)
    if not isinstance(kind, str) or not isinstance(place, str):
        raise CheckpointError(f"{path}: module {number} states no type and path: {_DOWNLOAD}")
    if place not in ("", "."):
        check_file_name(place, f"{path}: module {number}")
    return kind.rpartition(".")[2], place


def _read_modes(path: Path, members: Mapping[str, Any]) -> tuple[str, ...]:
    named = members.get("pooling_mode")
    several = named if isinstance(named, list) else [] if named is None else [named]
    modes = tuple(several) or tuple(mode for key, mode in _MODES.items() if members.get(key))
    if not modes or any(mode not in _MODES.values() for mode in modes):
        said = ", ".join(shorten(str(mode)) for mode in modes) or "none"
        raise CheckpointError(
            f"{path}: its pooling is {said}; known are {', '.join(_MODES.values())}: correct it, or state --pooling"
        )
    return modes


def _read_dense(folder: Path) -> tuple[nn.Module, str]:
    path = folder / "config.json"
    members = _members(path)
    width, out_width = members.get("in_features"), members.get("out_features")
    kind = str(members.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if not _is_width(width) or not _is_width(out_width) or kind not in _ACTIVATIONS:
        raise CheckpointError(
            f"{path}: in_features and out_features are whole numbers, and activation_function is one of "
            f"{', '.join(_ACTIVATIONS)}: use another model"
        )
    with torch.device("meta"):
        linear = nn.Linear(width, out_width, bias=bool(members.get("bias", True)))
    weights = _read_weights(folder)
    own = {name.removeprefix("linear."): value.float() for name, value in weights.items()}
    shapes = {name: value.shape for name, value in linear.state_dict().items()}
    if {name: value.shape for name, value in own.items()} != shapes:
        raise CheckpointError(f"{folder}: its weights do not have the shapes that {path.name} states: {_DOWNLOAD}")
    linear.load_state_dict(own, assign=True)
    dense = nn.Sequential(linear, getattr(nn, kind)()).eval().requires_grad_(False)
    return dense, f"dense {width} to {out_width} ({kind})"


def _is_width(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    files = [file for name in ("model.safetensors", "pytorch_model.bin") if (file := folder / name).is_file()]
    if not files:
        raise CheckpointError(f"{folder}: no model.safetensors and no pytorch_model.bin: download the folder again")
    try:
        if files[0].suffix == ".safetensors":
            return load_file(files[0])
        loaded: dict[str, torch.Tensor] = torch.load(files[0], map_location="cpu", weights_only=True)
        return loaded
    except OSError as error:
        raise unreadable(files[0], error) from error
    except (SafetensorError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{files[0]}: not readable weights ({error!s:.150}): {_DOWNLOAD}") from error


def _members(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path}: is missing, and {MODULES_NAME} names its folder: download it")
    return read_config(path)


def _read_prompts(folder: Path) -> dict[str, Any]:
    path = folder / PROMPTS_NAME
    if not path.is_file():
        return {}
    members = read_config(path)
    prompts, default = members.get("prompts") or {}, members.get("default_prompt_name")
    is_sound = isinstance(prompts, Mapping) and all(isinstance(text, str) for text in prompts.values())
    if not is_sound or (default is not None and default not in prompts):
        raise CheckpointError(
            f"{path}: prompts maps names to texts, and default_prompt_name is one of them: correct it, or {_DOWNLOAD}"
        )
    return {"prompts": dict(prompts), "default_prompt": "" if default is None else prompts[default]}


def describe(head: EmbeddingHead, prompt: str) -> str:
    """Return a line on what embeddings are."""
    before = f", each text behind {prompt!r:.80}" if prompt else ""
    return f"embeddings: pooled by {head} ({head.source}){before}"
