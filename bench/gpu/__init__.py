"""Runs on real GPUs: random weights in a real model's shapes, vLLM's own engine and workers."""
