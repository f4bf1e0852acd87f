"""The table of all keys of DeepSpeed's inference and ZeRO-Inference, and how zinfer treats each. The reader, the error
messages and the documentation are derived from it; other keys are errors.

Source: DeepSpeed 0.19, `inference/config.py`, `runtime/config.py`, `runtime/zero/config.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from zinfer.config import values
from zinfer.config.key import Key, ignored, section, supported
from zinfer.config.listing import checkpoint_path
from zinfer.config.process_groups import expert_group, parallel_unit, unsplit
from zinfer.config.quantization_keys import QUANTIZATION_KEYS
from zinfer.config.settings import Settings

TRITON = "all fused kernels here are Triton's, with tiles chosen by size; replace_with_kernel_inject asks for them"
OWN_EXCHANGE = "says how several GPUs share or exchange parameters; zinfer has its own way"
TRAINING = "controls training; nothing is trained here"
GRADIENTS = "concerns gradients; inference has none"
OPTIMIZER = "concerns the optimizer; inference has none"
LOSS_SCALE = "concerns the scaling of the loss; inference has none"
SAVING = "concerns saving trained weights; nothing is saved here"
REPORTS = "switches a report of DeepSpeed's training engine; use the engine's stats() instead"
DATA = "controls the loading of training data; nothing is trained here"
OF_THE_MODEL = "the checkpoint's own config.json describes the model"
MODULES_KEPT = "concerns DeepSpeed's replaced layers; transformers' own modules run here"


_ZERO = "zero_optimization"
_OFFLOAD = "zero_optimization.offload_param"


def _settings_keys(settings: Any = Settings, prefix: str = "") -> Iterator[Key]:
    """Yield the keys that are fields of the settings, each with its path there."""
    for each in fields(settings):
        if "key" in each.metadata:
            yield replace(each.metadata["key"], field=f"{prefix}{each.name}")
        elif is_dataclass(each.default):
            yield from _settings_keys(each.default, f"{each.name}.")


KEYS: tuple[Key, ...] = (
    *_settings_keys(),
    supported("base_dir", values.folder_or_empty, "base folder of a relative checkpoint, or of its files"),
    section("checkpoint_config", "the checkpoint, as a section", "ckpt_config"),
    supported("checkpoint_config.checkpoint_dir", checkpoint_path, "the same as checkpoint", same_as="checkpoint"),
    supported(
        "checkpoint_config.base_dir", values.folder_or_empty, "base folder of a relative checkpoint", same_as="base_dir"
    ),
    supported(
        "checkpoint_config.save_mp_checkpoint_path",
        values.folder_or_empty,
        "the same as save_mp_checkpoint_path",
        same_as="save_mp_checkpoint_path",
    ),
    section("tensor_parallel", "tensor parallelism", "tp"),
    supported(
        "tensor_parallel.tp_size", values.count(1), "ranks that divide each layer", same_as="zinfer.parallel.tensor"
    ),
    supported(
        "tensor_parallel.autotp_size",
        values.count_or_off,
        "tp_size in DeepSpeed's training; 0 states nothing",
        same_as="zinfer.parallel.tensor",
    ),
    supported(
        "tensor_parallel.mpu",
        parallel_unit,
        "an object with Megatron's get_model_parallel_world_size, _rank and _group: its group is tp_group",
        same_as="tensor_parallel.tp_group",
    ),
    *ignored("tensor_parallel", "tp_size alone says whether layers are split", "enabled"),
    *ignored("tensor_parallel", "layers are split by heads, and by groups of quantized columns", "tp_grain_size"),
    *ignored("tensor_parallel", OWN_EXCHANGE, "tp_overlap_comm"),
    *ignored("", "layers are split by heads, and by groups of quantized columns", "tp_grain_size"),
    supported("mp_size", values.count(1), "old spelling", same_as="zinfer.parallel.tensor"),
    supported("training_mp_size", unsplit, "ranks of training that have split the checkpoint: 1 alone"),
    supported("mpu", parallel_unit, "the same as tensor_parallel.mpu", same_as="tensor_parallel.tp_group"),
    *ignored("", "written by DeepSpeed itself, from injection_policy", "injection_policy_tuple"),
    *ignored("", TRITON, "use_triton", "triton_autotune"),
    section("moe", "mixtures of experts", idle=(True,)),
    supported("moe.enabled", values.flag, "false: experts are not divided; ep_size must be 1", default=True),
    supported("moe.type", values.mixture, "kind of the mixtures", default="standard"),
    supported("moe.ep_size", values.count(1), "ranks that divide experts", same_as="zinfer.parallel.expert"),
    supported("ep_size", values.count(1), "old spelling", same_as="zinfer.parallel.expert"),
    supported("ep_group", expert_group, "old spelling", "expert_group", same_as="moe.ep_group"),
    supported("ep_mp_group", expert_group, "old spelling", "expert_mp_group", same_as="moe.ep_mp_group"),
    supported("moe_experts", values.num_experts, "old spelling", same_as="moe.moe_experts"),
    supported("moe_type", values.mixture, "old spelling", same_as="moe.type"),
    *ignored("", "selected how layers are replaced; DeepSpeed has only one way left", "replace_method"),
    *ignored("", MODULES_KEPT, "return_tuple", "transposed_mode"),
    *ignored("", "the model's own attention knows its mask", "triangular_masking|tm"),
    *ignored("", "no model is moved to the device as a whole; the homes of its blocks decide", "keep_module_on_host"),
    *ignored("", "modules are always built empty, and their weights stream", "set_empty_params"),
    *ignored("", OF_THE_MODEL, "config|args"),
    *ignored("", OF_THE_MODEL, "hidden_size", "intermediate_size", "num_hidden_layers", "heads", "num_kv", "norm_type"),
    *ignored("", OF_THE_MODEL, "layer_norm_eps", "pre_layer_norm", "mlp_act_func_type", "mlp_after_attn", "use_mup"),
    *ignored("", OF_THE_MODEL, "rotary_dim", "rotate_half", "rotate_every_two", "rope_theta", "bigscience_bloom"),
    *ignored("", OF_THE_MODEL, "local_attention", "window_size", "scale_attention", "scale_attn_by_inverse_layer_idx"),
    *ignored("", "the model's own attention knows its mask", "invert_mask"),
    *ignored("", MODULES_KEPT, "stochastic_mode", "return_single_tuple", "enable_qkv_quantization"),
    *ignored("", "each rank takes the GPU of its local number", "local_rank"),
    section(_ZERO, "ZeRO-Inference", "zero"),
    supported(f"{_ZERO}.stage", values.count(0, 3), "3 if parameters are offloaded, else any"),
    section(_OFFLOAD, "home of the parameters"),
    supported(
        f"{_ZERO}.cpu_offload_param",
        values.cpu_if_true,
        'old spelling of offload_param {"device": "cpu"}',
        same_as=f"{_OFFLOAD}.device",
    ),
    supported(
        f"{_ZERO}.cpu_offload_use_pin_memory",
        values.flag,
        "old spelling of offload_param.pin_memory",
        same_as=f"{_OFFLOAD}.pin_memory",
    ),
    *ignored(
        _ZERO,
        "weights outside the layers stay on the device wherever the budget holds them, whatever their size",
        "stage3_param_persistence_threshold|param_persistence_threshold",
        "stage3_model_persistence_threshold|model_persistence_threshold",
    ),
    *ignored(
        _ZERO,
        "a layer is used again one whole pass later; offload_param and the budgets decide what stays on the device",
        "stage3_max_reuse_distance|max_reuse_distance",
    ),
    supported(
        f"{_ZERO}.zero_hpz_partition_size",
        values.above_one,
        "ranks that share one model, the others being replicas; 0 and 1 state nothing",
        same_as="zinfer.parallel.zero",
    ),
    section(f"{_ZERO}.leaf_module", "modules whose weights are used together; those in a layer always are"),
    *ignored(_ZERO, GRADIENTS, "contiguous_gradients", "reduce_scatter", "reduce_bucket_size"),
    *ignored(_ZERO, GRADIENTS, "round_robin_gradients", "zero_quantized_gradients", "zeropp_loco_param"),
    *ignored(_ZERO, GRADIENTS, "overlap_comm", "use_multi_rank_bucket_allreduce"),
    *ignored(_ZERO, OPTIMIZER, "offload_optimizer", "sub_group_size", "cpu_offload", "load_from_fp32_weights"),
    *ignored(_ZERO, OPTIMIZER, "zenflow", "legacy_stage1", "elastic_checkpoint"),
    *ignored(_ZERO, OPTIMIZER, "save_muon_momentum_buffer_in_memory"),
    *ignored(_ZERO, OWN_EXCHANGE, "allgather_partitions", "allgather_bucket_size", "allgather_size"),
    *ignored(_ZERO, OWN_EXCHANGE, "stage3_use_all_reduce_for_fetch_params|use_all_reduce_for_fetch_params"),
    *ignored(_ZERO, OWN_EXCHANGE, "stage3_allgather_sequential|allgather_sequential"),
    *ignored(_ZERO, OWN_EXCHANGE, "mics_shard_size", "mics_hierarchical_params_gather"),
    *ignored(_ZERO, SAVING, "stage3_gather_16bit_weights_on_model_save|gather_16bit_weights_on_model_save"),
    *ignored(_ZERO, SAVING, "stage3_gather_fp16_weights_on_model_save|gather_fp16_weights_on_model_save"),
    *ignored(_ZERO, TRAINING, "ignore_unused_parameters", "memory_efficient_linear", "pipeline_loading_checkpoint"),
    *ignored(_ZERO, REPORTS, "log_trace_cache_warnings", "enable_sanity_checks"),
    *ignored(
        _ZERO,
        "a whole transformer layer is streamed at once here",
        "stage3_module_granularity_threshold|module_granularity_threshold",
    ),
    *ignored(
        _ZERO,
        "parameters are never partitioned while the model is built; checkpoint files are read in place",
        "stage3_partition_stream_chunk_size|partition_stream_chunk_size",
        "override_module_apply",
    ),
    section("aio", "how the disk is read"),
    supported("aio.thread_count", values.count(1), "old spelling", same_as="aio.intra_op_parallelism"),
    *ignored("aio", "each reading thread has one request in flight", "single_submit", "overlap_events"),
    section("fp16", "half precision"),
    supported("fp16.enabled", values.flag, "true sets dtype to fp16", default=False),
    *ignored("fp16", LOSS_SCALE, "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
    *ignored("fp16", LOSS_SCALE, "consecutive_hysteresis", "min_loss_scale"),
    *ignored("fp16", TRAINING, "auto_cast", "fp16_master_weights_and_grads", "fused_mode"),
    section("bf16", "bfloat16 precision", "bfloat16"),
    supported("bf16.enabled", values.flag, "true sets dtype to bf16", default=False),
    *ignored("bf16", GRADIENTS, "immediate_grad_update", "check_grad_overflow"),
    *ignored("bf16", OPTIMIZER, "bf16_master_weights_and_grads", "bf16_optimizer_states"),
    *ignored("", "training batches; generation takes its own", "train_batch_size"),
    *ignored("", "training batches; generation takes its own", "train_micro_batch_size_per_gpu"),
    *ignored("", OPTIMIZER, "optimizer", "scheduler", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *ignored("", GRADIENTS, "gradient_accumulation_steps", "managed_gradient_accumulation", "gradient_clipping"),
    *ignored("", GRADIENTS, "gradient_predivide_factor", "gradient_allreduce_op", "gradient_accumulation_dtype"),
    *ignored("", GRADIENTS, "prescale_gradients", "sparse_gradients", "data_types"),
    *ignored("", REPORTS, "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "timers"),
    *ignored("", REPORTS, "flops_profiler", "comms_logger", "log_level"),
    *ignored("", REPORTS, "tensorboard", "wandb", "csv_monitor", "comet", "trackio"),
    *ignored(
        "", OWN_EXCHANGE, "communication_data_type", "seq_parallel_comm_data_type|seq_parallel_communication_data_type"
    ),
    *ignored("", OWN_EXCHANGE, "disable_allgather", "sequence_parallel_size", "use_data_before_expert_parallelism"),
    *ignored("", TRAINING, "amp", "torch_autocast", "activation_checkpointing", "progressive_layer_drop"),
    *ignored("", TRAINING, "eigenvalue", "elasticity", "autotuning", "pipeline", "hybrid_engine", "expert_parallel"),
    *ignored("", TRAINING, "compression_training", "quantize_training", "sparse_attention", "vocabulary_size"),
    *ignored("", TRAINING, "graph_harvesting", "compile"),
    *ignored("", DATA, "data_efficiency", "curriculum_learning", "dataloader_drop_last"),
    *ignored("", SAVING, "nebula", "datastates"),
    section("zinfer", "zinfer's own keys; keyword arguments may omit the section"),
    section("zinfer.parallel", 'how ranks share a job: sizes of modes that multiply to the number of ranks, or "auto"'),
    *QUANTIZATION_KEYS,
)

BY_PATH: dict[str, Key] = {key.path: key for key in KEYS}

BY_NAME: dict[str, dict[str, Key]] = {"": {}}
"""The keys of each section by name and alias; sections are named by path, the top by an empty string."""
for _key in KEYS:
    for _name in (_key.name, *_key.aliases):
        BY_NAME.setdefault(_key.parent, {})[_name] = _key
