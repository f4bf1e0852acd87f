"""`LoadedWeights`: what a rank streams, to be compared with the other ranks before they share it.

Each host may have a copy of the model, and a store made of it, of its own. Ranks that gathered ranges of different
weights, or divided different ones, would compute nonsense without an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zinfer.checkpoint import Checkpoint
from zinfer.checkpoint.fingerprint import weights_sample
from zinfer.errors import CheckpointError
from zinfer.quantization.native.manifest import MANIFEST_NAME, Manifest

_PART = "shard"


@dataclass(frozen=True)
class LoadedWeights:
    """The weights of one rank.

    Attributes:
        folder: of the checkpoint or store.
        source: identifies the original's files; of a store, those that it was made of.
        settings: of a store: how its weights were converted. None for an original.
        part: of a store: which rank's part of each layer it has; None for whole layers.
        checksums: of a store's blocks, by the names of their files.
    """

    folder: str
    source: Mapping[str, str]
    settings: Mapping[str, Any] | None = None
    part: str | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "LoadedWeights":
        """Describe a checkpoint or store; reads samples of an original's weights.

        Raises:
            CheckpointError, OSError: a file cannot be read.
        """
        folder = f"{checkpoint.folder}"
        if checkpoint.is_listed or not (checkpoint.folder / MANIFEST_NAME).is_file():
            source = {"fingerprint": checkpoint.fingerprint, "weights_sample": weights_sample(tuple(checkpoint.files))}
            return cls(folder, source)
        manifest = Manifest.read(checkpoint.folder)
        identity, checksums = manifest.identity, {file: each.checksum for file, each in manifest.blocks.items()}
        source = {name: identity.source[name] for name in ("fingerprint", "weights_sample")}
        settings = {name: value for name, value in identity.settings.items() if name != _PART}
        return cls(folder, source, settings, identity.settings.get(_PART), checksums)

    def differences(self, other: "LoadedWeights") -> Iterator[str]:
        """Yield what is different about another rank's; of two parts the blocks differ anyway."""
        if (self.settings is None) != (other.settings is None):
            yield "one is a store and the other is not"
            return
        if self.source["fingerprint"] != other.source["fingerprint"]:
            yield "config.json, or names, sizes or headers of weight files"
        elif self.source != other.source:
            yield "the weights"
        if self.settings != other.settings:
            yield "how weights were converted"
        if self.part == other.part:
            names = {*self.checksums.items()} ^ {*other.checksums.items()}
            if names:
                yield f"the bytes of {min(names)[0]}"


def check_alike(several: Sequence[LoadedWeights | None], names: Sequence[str]) -> None:
    """Compare what ranks have loaded, by rank.

    Args:
        several: of each rank; None for weights that are in no file, which are not compared.
        names: of the ranks, for messages.

    Raises:
        CheckpointError: a rank has other weights than the first one; names both folders, and what differs.
    """
    known = [(each, name) for each, name in zip(several, names, strict=True) if each is not None]
    for place, (own, name) in enumerate(known):
        # The first with the same part, whose blocks must be the same; and the first of all.
        alike = next(each for each in known if each[0].part == own.part)
        for other, other_name in (known[0], alike) if place else ():
            if found := [*other.differences(own)]:
                raise CheckpointError(
                    f"{name} has loaded {own.folder}, and {other_name} {other.folder}, which differ in "
                    f"{', '.join(found)}: give all ranks copies of the same model; of stores under "
                    "zero_optimization.offload_param.nvme_path remove the wrong one, and the next start writes it again"
                )
