"""Plan a run before it begins: memory, placement and time. Uses no device.

From a configuration to a plan, one file per step:

    model/outline   blocks and `ModelSpec` of a checkpoint, or of config.json alone
    presets         the `Machine`: budgets and rates (data_sheets: those of published cards)
    memory          KV cache and activations of a request, and the memory left for weights
    kv_budget       the same for continuous batching: pages, and tokens per pass
    placement       the home of each block, and the buffers that stream the rest (host_placement: the host's part)
    block_work      what a pass computes and moves for each block
    step_time       seconds per pass, by resource
    simulation      the passes of a job
    job_estimator   their seconds
    plan, job_plan  a batch and a job: the steps above, for given sizes or the fastest of several
    advice          changes that make it faster
    tables          output as tables and JSON

Each file imports only those above it. Engines follow the same steps with real blocks: `zinfer.engine.estimator`.
"""
