"""vLLM as an engine whose weights are swapped in place.

Open `vllm_engine` first; `arena_worker` runs inside vLLM's workers.
"""
