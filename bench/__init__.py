"""Benchmarks of vllm_ppbalance: a pipeline in virtual time, workloads, live servers, reports."""
