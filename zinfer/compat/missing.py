"""What to use instead of DeepSpeed's public names that are not here, for `import zinfer as deepspeed`.

Attributes raise AttributeError, and imports ModuleNotFoundError, with the same sentence.
"""

from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

_TRAINING: Final = "it trains, and nothing is trained here; keep DeepSpeed for it"
_ENGINE: Final = "zinfer.InferenceEngine is what init_inference and initialize return"
_INJECT: Final = (
    "init_inference(model, replace_with_kernel_inject=True) gives modules fused kernels, injection_policy={Block: "
    "(linear layers)} names blocks, and tensor_parallel={'tp_size': N} divides layers"
)
_QUANTIZE: Final = "use zinfer.quantize_transformer(model), or weight_quantization in the configuration"
_CONFIG: Final = "give the configuration as a dict, or as zinfer.ops.transformer.inference.Config"
_LOGGER: Final = 'use logging.getLogger("zinfer")'
_CPU_MEMORY: Final = "zinfer plan --model FOLDER says what a model needs"
_LAUNCH: Final = "start a script by torchrun --nproc-per-node N script.py, and a batch job by zinfer run --ranks N"
_LAYERS: Final = "the model's own layers run; replace_with_kernel_inject=True gives them fused kernels"

_SENTENCES: Final = {
    "ADAM_OPTIMIZER": _TRAINING,
    "DeepSpeedConfig": _CONFIG,
    "DeepSpeedDataLoader": _TRAINING,
    "DeepSpeedEngine": _ENGINE,
    "DeepSpeedHybridEngine": _TRAINING,
    "DeepSpeedOptimizer": _TRAINING,
    "DeepSpeedOptimizerCallable": _TRAINING,
    "DeepSpeedSchedulerCallable": _TRAINING,
    "DeepSpeedTransformerConfig": _LAYERS,
    "DeepSpeedTransformerLayer": _LAYERS,
    "HAS_TRITON": "import triton says whether there is one",
    "LAMB_OPTIMIZER": _TRAINING,
    "MUON_OPTIMIZER": _TRAINING,
    "PipelineEngine": _TRAINING,
    "PipelineModule": f"{_TRAINING}. Layers of a model are divided among ranks by zinfer.parallel.pipeline",
    "TORCH_DISTRIBUTED_DEFAULT_PORT": "init_distributed(distributed_port=...) takes any port; 29500 by default",
    "add_tuning_arguments": _TRAINING,
    "autotuning": "zinfer plan finds the sizes of a job, and zinfer bench measures them",
    "checkpoint": f"{_TRAINING}. A model's weights are given as a folder of safetensors",
    "checkpointing": _TRAINING,
    "compile": "engine.compile() compiles layers",
    "compression": _QUANTIZE,
    "constants": "there are no such constants here",
    "datastates": _TRAINING,
    "dist": "use zinfer.comm",
    "domino": _TRAINING,
    "elasticity": _TRAINING,
    "env_report": "zinfer probe reports the machine",
    "git_branch": "zinfer.__version__ is the version",
    "git_hash": "zinfer.__version__ is the version",
    "git_version_info": "zinfer.__version__ is the version",
    "inference": f"{_CONFIG}; {_QUANTIZE}; zinfer.LLM batches requests, and zinfer.mii is DeepSpeed-MII's API",
    "io": _TRAINING,
    "is_compile_supported": "torch.compile always is; engine.compile() uses it",
    "launcher": _LAUNCH,
    "linear": _QUANTIZE,
    "log_dist": _LOGGER,
    "logger": _LOGGER,
    "model_implementations": _LAYERS,
    "module_inject": _INJECT,
    "moe": f"{_TRAINING}. moe={{'ep_size': N}} divides a model's experts among ranks",
    "monitor": _TRAINING,
    "nebula": _TRAINING,
    "nvme": "zinfer probe measures the disk and prints an aio section",
    "ops.adam": _TRAINING,
    "ops.aio": "nvme_path in the configuration reads weights from the disk",
    "ops.fp_quantizer": _QUANTIZE,
    "ops.op_builder": "kernels are compiled by Triton when they are needed, or by zinfer warmup",
    "ops.quantizer": _QUANTIZE,
    "ops.sparse_attention": "attention is the model's own",
    "ops.transformer.inference.DeepSpeedMoEInference": _LAYERS,
    "ops.transformer.inference.DeepSpeedMoEInferenceConfig": _CONFIG,
    "ops.transformer.inference.config": "import Config from zinfer.ops.transformer.inference",
    "pipe": _TRAINING,
    "profiling": "engine.profile_model_time() and engine.model_times() time forwards; zinfer.trace records a pass",
    "replace_transformer_layer": _INJECT,
    "revert_transformer_layer": "engine.destroy() removes an engine's kernels",
    "runtime.activation_checkpointing": _TRAINING,
    "runtime.config": _CONFIG,
    "runtime.engine": _ENGINE,
    "runtime.pipe": _TRAINING,
    "runtime.zero": "use zinfer.zero.Init",
    "sequence": _TRAINING,
    "set_autotp_mode": _INJECT,
    "set_optimizer_flags": _TRAINING,
    "tp_model_init": "init_inference(model, tensor_parallel={'tp_size': N}) divides the layers",
    "utils": f"{_LOGGER}, zinfer.OnDevice and zinfer.comm",
    "zero.GatheredParameters": "engine.module.state_dict() reads whole weights, streamed ones too",
    "zero.MiCS_Init": "use zinfer.zero.Init",
    "zero.TiledLinear": _TRAINING,
    "zero.estimate_zero3_model_states_mem_needs_all_live": _CPU_MEMORY,
}


def sentence_for(name: str) -> str | None:
    """Return what to use instead of a name of DeepSpeed's, without its package; None if nothing is known of it."""
    parts = name.split(".")
    known = (_SENTENCES.get(".".join(parts[:length])) for length in range(len(parts), 0, -1))
    sentence = next(filter(None, known), None)
    return sentence and f"zinfer has no {name}: {sentence}"


class Finder:
    """Explains imports of DeepSpeed's modules and names below ``zinfer``, once no other finder has found them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError for what is explained; else return None."""
        if fullname.startswith("zinfer.") and (sentence := sentence_for(fullname.removeprefix("zinfer."))):
            raise ModuleNotFoundError(sentence)  # without its name, for which `from zinfer import ...` would skip it
        return None
