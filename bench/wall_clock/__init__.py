"""Real vLLM whose stages spend a profile's time instead of computing: no GPU, real clients.

`python -m bench.wall_clock.serve --help` starts a server. API server, engine core, scheduler,
executor and the messages between the stages are vLLM's own; `Worker` stands where a GPU's would.
"""
