"""What a run will take and how long, decided before it begins: memory, placement, seconds. Touches no device.

The walk from a config to a plan, one file a step:

    model/outline   blocks and `ModelSpec` of a checkpoint, or of config.json alone
    presets         the `Machine`: budgets and rates
    memory          KV cache and activations of a request, and what they leave for weights
    kv_budget       the same for continuous batching: pages, and tokens a pass
    placement       where each block is kept, and the buffers that stream the rest (host_placement: the host's part)
    step_time       seconds of a pass, by resource
    simulation      the passes of a job, and their seconds
    plan, job_plan  a batch and a job: the steps above, for one choice of sizes or the fastest of several
    advice          what else to choose
    tables          how it is printed

Each imports from those above it. Engines walk the same way, with blocks that exist: `zinfer.engine.estimator`.
"""
