"""Fit of a latency profile to Vidur's operator times on one A100 (`a100_vidur/*.csv`)."""

import argparse
import csv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.batch import BatchShape
from bench.fit_common import (
    Floats,
    error_fields,
    head_table,
    least_absolute,
    percent_errors,
    round_seconds,
    table_rows,
)
from bench.latency import LatencyProfile

TILE = 128  # tokens a GEMM tile covers on A100: a batch one token longer costs a tile more
LAYER_OPERATORS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)


@dataclass(frozen=True, slots=True)
class Operators:
    """Seconds by tokens at tensor parallel size 1: all linear operators of a layer, embedding."""

    layer_s: dict[int, float]
    embedding_s: dict[int, float]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's GEMMs."""
        head = self.hidden_size // self.num_heads
        attention = self.hidden_size * (self.hidden_size * 2 + 2 * self.num_kv_heads * head)
        return attention + 3 * self.hidden_size * self.intermediate_size


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One attention call of one layer, seconds: a prefill chunk, or a batch of decodes."""

    new: int
    prefix: int  # tokens in the cache, of each sequence
    decodes: int
    seconds: float


def _read(path: str | Path) -> Iterable[tuple[int, dict[str, str]]]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        yield from enumerate(csv.DictReader(file), start=2)


def load_operators(path: str | Path) -> Operators:
    """Medians at TP 1. Raises ValueError naming file and line."""
    layer: dict[int, list[float]] = {}
    embedding: dict[int, list[float]] = {}
    row: dict[str, str] = {}
    last: dict[str, str] = {}
    for number, row in _read(path):
        try:
            if int(row["num_tensor_parallel_workers"]) != 1:
                continue
            tokens = int(row["num_tokens"])
            total = sum(float(row[f"time_stats.{name}.median"]) for name in LAYER_OPERATORS)
            layer.setdefault(tokens, []).append(total / 1e3)
            embedding.setdefault(tokens, []).append(float(row["time_stats.emb.median"]) / 1e3)
            last = row
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not an operator row: {error!r}") from error
    if not last:
        raise ValueError(f"{path}: no row with num_tensor_parallel_workers = 1")
    return Operators(
        layer_s={n: median(layer[n]) for n in sorted(layer)},
        embedding_s={n: median(embedding[n]) for n in sorted(embedding)},
        hidden_size=int(last["n_embd"]),
        intermediate_size=int(last["n_expanded_embd"]),
        num_heads=int(last["n_head"]),
        num_kv_heads=int(last["n_kv_head"]),
    )


def load_attention(path: str | Path) -> tuple[int, list[AttentionRow]]:
    """(tensor parallel size, rows). Raises ValueError naming file and line."""
    rows: list[AttentionRow] = []
    tensor_parallel = 0
    for number, row in _read(path):
        try:
            prefill = row["is_prefill"] == "True"
            name = "attn_prefill" if prefill else "attn_decode"
            tensor_parallel = int(row["num_tensor_parallel_workers"])
            rows.append(
                AttentionRow(
                    new=int(row["prefill_chunk_size"]),
                    prefix=int(row["kv_cache_size"]),
                    decodes=0 if prefill else int(row["batch_size"]),
                    seconds=float(row[f"time_stats.{name}.median"]) / 1e3,
                )
            )
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not an attention row: {error!r}") from error
    if not rows:
        raise ValueError(f"{path}: no attention rows")
    return tensor_parallel, rows


def step_table(seconds: dict[int, float], tile: int = TILE) -> list[tuple[int, float]]:
    """Table rows with the tile steps kept: just over a multiple of `tile` costs what follows it."""
    table: list[tuple[int, float]] = []
    before = 0
    for tokens, value in sorted(seconds.items()):
        edge = (tokens - 1) // tile * tile
        if before and before <= edge < tokens - 1:
            table.append((edge + 1, value))
        table.append((tokens, value))
        before = tokens
    return table


def _attention_terms(row: AttentionRow) -> list[float]:
    if row.decodes:
        return [0.0, 0.0, 0.0, 0.0, row.decodes * row.prefix, row.decodes, 1.0]
    return [2.0 * row.new * row.prefix, row.new**2, row.new, 1.0, 0.0, 0.0, 0.0]


def fit_attention(rows: list[AttentionRow]) -> Floats:
    """Seconds per (pair, square, token, chunk, decode context token, decode, decode batch).

    The square has a coefficient of its own: this kernel computes most of what the mask hides.
    """
    design = np.array([_attention_terms(row) for row in rows], dtype=np.float64)
    times = np.array([row.seconds for row in rows], dtype=np.float64)
    return np.maximum(least_absolute(design / times[:, None], np.ones(len(rows))), 0.0)


def vidur_fields(args: argparse.Namespace) -> dict[str, Any]:
    """A profile's fields from `args.mlp` and `args.attention`, CSV files of Vidur."""
    operators = load_operators(args.mlp)
    tensor_parallel, rows = load_attention(args.attention)
    fields: dict[str, Any] = {
        "name": args.name,
        "gpu": "NVIDIA A100 80GB",
        "model": args.model,
        "dtype": "float16",
        "hidden_size": operators.hidden_size,
        "vocab_size": args.vocab_size,
        "num_hidden_layers": args.num_hidden_layers,
        "layers_measured": 1,
        "source": f"microsoft/vidur: {Path(args.mlp).name}, {Path(args.attention).name}",
        "licence": "MIT",
        "notes": args.notes,
        "host": {
            "contained_in_rows": False,
            "step_s": 0.0,
            "decode_s": 0.0,
            "new_request_s": 0.0,
            "note": "kernel times: they hold no host work",
        },
    }
    measured = _layer_shapes(operators, rows, tensor_parallel)
    whole = _timings(operators, rows, tensor_parallel, args.vocab_size)
    errors = _errors(fields | whole, measured)
    heldout: list[float] = []
    for part in (0, 1):
        seen = sorted(operators.layer_s)
        half = {n: operators.layer_s[n] for n in (*seen[part::2], seen[0], seen[-1])}
        fitted = _timings(replace(operators, layer_s=half), rows[part::2], tensor_parallel, 1)
        unseen = [m for m in measured[1 - part :: 2] if m[0].num_tokens not in half]
        heldout += _errors(fields | fitted, unseen).tolist()
    fields["fit"] = error_fields(
        len(operators.layer_s) + len(rows), errors, np.array(heldout, dtype=np.float64)
    )
    return fields | whole


def _timings(
    operators: Operators, rows: list[AttentionRow], tensor_parallel: int, vocab_size: int
) -> dict[str, Any]:
    terms = fit_attention(rows)
    # Heads and cache bytes on a GPU grow as tensor parallelism shrinks; launch constants do not.
    pair, square, token, context, decode = (terms[i] * tensor_parallel for i in (0, 1, 2, 4, 5))
    table = step_table(operators.layer_s)
    most = max(operators.embedding_s)
    return {
        "embedding_token_s": round_seconds(operators.embedding_s[most] / most),
        "attention": {
            "prefill_pair_s": round_seconds(pair),
            "prefill_square_s": round_seconds(square),
            "prefill_token_s": round_seconds(token),
            "prefill_chunk_s": round_seconds(terms[3]),
            "decode_context_s": round_seconds(context),
            "decode_s": round_seconds(decode),
            "decode_batch_s": round_seconds(terms[6]),
        },
        "linear_table": table_rows(table),
        "lm_head_table": head_table(
            table, operators.layer_parameters, vocab_size * operators.hidden_size
        ),
    }


def _layer_shapes(
    operators: Operators, rows: list[AttentionRow], tensor_parallel: int
) -> list[tuple[BatchShape, float]]:
    """A layer's time is the sum of its operators, for each shape that has both measured."""
    shapes: list[tuple[BatchShape, float]] = []
    for row in rows:
        linear_s = operators.layer_s.get(row.decodes or row.new)
        if linear_s is None:
            continue
        shape = (
            BatchShape((), row.decodes, row.decodes, row.decodes * row.prefix)
            if row.decodes
            else BatchShape(((row.new, row.prefix),))
        )
        shapes.append((shape, linear_s + tensor_parallel * row.seconds))
    return shapes


def _errors(fields: dict[str, Any], measured: list[tuple[BatchShape, float]]) -> Floats:
    placeholder = error_fields(1, np.zeros(1), np.zeros(1))
    profile = LatencyProfile.model_validate({**fields, "fit": placeholder})
    predicted = np.array([profile.stage_seconds(shape, 1) for shape, _ in measured])
    return percent_errors(predicted, np.array([seconds for _, seconds in measured]))
