"""Streams a module tree's weights under its own forward: before a block computes its tensors are put in, after it they
are taken out again.

Between uses a streamed parameter is a meta tensor, so that reading it outside the model's forward is an error instead
of another block's bytes.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle

from zinfer.cut import ModelBlock
from zinfer.offload.streamer import Streamer


class StreamingHooks:
    """Binds resident blocks for good and streamed ones while their modules run.

    Args:
        model: the module whose forward is one pass.
        blocks: all its blocks; those that ``resident`` lacks are streamed.
        resident: tensors of resident blocks, by block index.
        streamer: moves the others; None when there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[ModelBlock],
        resident: Mapping[int, Mapping[str, nn.Parameter]],
        streamer: Streamer | None,
    ) -> None:
        self._streamer = streamer
        self._blocks = blocks
        self._empty = [_meta_parameters(block) for block in blocks]
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(self._begin_pass)]
        self.passes = 0
        for block in blocks:
            if block.block.index in resident:
                _bind(block, resident[block.block.index])
            else:
                self._unbind(block)
                for site in block.sites:
                    self._handles.append(site.register_forward_pre_hook(self._before(block)))
                    self._handles.append(site.register_forward_hook(self._after(block), always_call=True))

    def remove(self) -> None:
        """Take the hooks off and leave every parameter a meta tensor; the slabs may be freed after."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for block in self._blocks:
            self._unbind(block)

    def _begin_pass(self, model: nn.Module, args: object) -> None:
        self.passes += 1
        if self._streamer is not None:
            self._streamer.begin_pass()

    def _before(self, block: ModelBlock) -> Callable[[nn.Module, object], None]:
        streamer = self._streamer
        assert streamer is not None, f"block {block.block.name} is not resident and nothing streams it"

        def bring(site: nn.Module, args: object) -> None:
            _bind(block, streamer.wait(block.block))

        return bring

    def _after(self, block: ModelBlock) -> Callable[[nn.Module, object, object], None]:
        streamer = self._streamer
        assert streamer is not None

        def let_go(site: nn.Module, args: object, output: object) -> None:
            if streamer.holds(block.block):  # a failed wait runs this hook too
                self._unbind(block)
                streamer.release(block.block)

        return let_go

    def _unbind(self, block: ModelBlock) -> None:
        _bind(block, self._empty[block.block.index])


def _meta_parameters(block: ModelBlock) -> dict[str, nn.Parameter]:
    return {
        binding.tensor: nn.Parameter(binding.module._parameters[binding.leaf].to("meta"), requires_grad=False)  # type: ignore[union-attr]
        for binding in block.bindings
    }


def _bind(block: ModelBlock, tensors: Mapping[str, nn.Parameter]) -> None:
    for binding in block.bindings:
        binding.module._parameters[binding.leaf] = tensors[binding.tensor]
