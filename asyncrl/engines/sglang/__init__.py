"""SGLang servers: what starts one, and what runs inside its scheduler process.

    arguments    the command line and environment of a server, checked against the server's own list (pure)
    process      one server as a child process: start, readiness, log, end
    ---
    hooks        inside the server: where asyncrl looks into a scheduler, and what it mends there
    target       the scheduler's parameters as a WeightTarget: found by Hugging Face names, swapped between two steps
    naming       where a model's loader puts each Hugging Face tensor
    shadow       a second memory for a model's parameters

The lower four load torch and sglang only, beside what the weight receiver loads; the upper two load neither.
"""
