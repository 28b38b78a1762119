"""Profile fields from measured rows of one stage, and the host work to take off them."""

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.batch import BatchShape
from bench.fit_common import Floats, error_fields, head_table, percent_errors, round_seconds
from bench.fit_common import table_rows as as_rows
from bench.fit_host import decode_gaps, host_seconds, mean_decode_context
from bench.fit_rows import (
    CUDAGRAPH_SIZES,
    SHORT_TOKENS,
    MeasuredShape,
    RowFit,
    fit_shapes,
    heldout_errors,
    load_rows,
    predict_rows,
    table_tokens,
)
from bench.latency import LatencyProfile

KV_BYTES = 2 * 2  # a key and a value, two bytes each


def layer_parameters(meta: dict[str, Any]) -> int:
    """Weights of one layer's GEMMs, from the `meta` line of the rows."""
    hidden, heads, kv_heads = int(meta["hidden"]), int(meta["heads"]), int(meta["kv_heads"])
    attention = hidden * (2 * hidden + 2 * kv_heads * (hidden // heads))
    return attention + 3 * hidden * int(meta["intermediate"])


def stage_fields(args: argparse.Namespace) -> dict[str, Any]:
    """A profile's fields from `args.rows`; host time is taken off as `args.host_*` say."""
    meta, shapes = load_rows(args.rows)
    layers, knots = int(meta["layers"]), table_tokens(shapes)
    fixed = None if args.decode_context_ns is None else args.decode_context_ns * 1e-9 * layers
    fit = fit_shapes(shapes, knots, fixed)
    fields: dict[str, Any] = {
        "name": args.name,
        "gpu": meta["gpu"],
        "model": args.model,
        "dtype": meta["dtype"],
        "hidden_size": int(meta["hidden"]),
        "vocab_size": args.vocab_size,
        "num_hidden_layers": args.num_hidden_layers,
        "layers_measured": layers,
        "source": f"vLLM {meta['vllm']}, one stage alone: {Path(args.rows).name}",
        "licence": "Apache-2.0 (measured for this project)",
        "notes": args.notes,
        **_timings(fit, meta, args),
    }
    heldout = heldout_errors(shapes, knots, fixed)
    fields["fit"] = error_fields(
        sum(len(s.seconds) for s in shapes), _errors(fields, shapes), heldout
    )
    head_dim = int(meta["hidden"]) // int(meta["heads"])
    cache_bytes = int(meta["kv_heads"]) * head_dim * KV_BYTES * layers
    print(f"the cache is read at {cache_bytes / fit.decode_context_s / 1e12:.2f} TB/s")
    print(f"the rows hold {fit.decode_s * 1e6:.1f} us a decode, host and GPU together")
    return fields


def _timings(fit: RowFit, meta: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    layers = int(meta["layers"])
    step_s, decode_s = args.host_step_ms / 1e3, args.host_decode_us / 1e6
    if step_s >= fit.linear_s[0]:
        raise ValueError(f"host_step_ms = {args.host_step_ms}: must be under the shortest step")
    linear = [(n, (s - step_s) / layers) for n, s in zip(fit.knots, fit.linear_s, strict=True)]
    pair_s = round_seconds(fit.prefill_pair_s / layers)
    head_parameters = args.vocab_size * int(meta["hidden"])
    return {
        "host": {
            "contained_in_rows": True,
            "step_s": round_seconds(step_s),
            "decode_s": round_seconds(decode_s),
            "new_request_s": round_seconds(fit.new_request_s),
            "note": args.host_note,
        },
        "attention": {
            "prefill_pair_s": pair_s,
            "prefill_square_s": pair_s,
            "prefill_short_s": round_seconds(fit.prefill_short_s / layers),
            "prefill_short_tokens": SHORT_TOKENS,
            "decode_context_s": round_seconds(fit.decode_context_s / layers),
            "decode_s": round_seconds(max(fit.decode_s - decode_s, 0.0) / layers),
        },
        "cudagraph_capture_sizes": list(CUDAGRAPH_SIZES),
        "linear_table": as_rows(linear),
        "lm_head_table": head_table(linear, layer_parameters(meta), head_parameters),
    }


def _errors(fields: dict[str, Any], shapes: Sequence[MeasuredShape]) -> Floats:
    """Errors of the profile itself, its host time put back."""
    placeholder = error_fields(1, np.zeros(1), np.zeros(1))
    profile = LatencyProfile.model_validate({**fields, "fit": placeholder})
    host = profile.host
    predicted = [
        profile.stage_seconds(s.shape, profile.layers_measured)
        + host.step_s
        + host.decode_s * s.shape.decodes
        + host.new_request_s * sum(prefix == 0 for _, prefix in s.shape.prefills)
        for s in shapes
    ]
    return percent_errors(np.array(predicted), np.array([s.best_s for s in shapes]))


def calibrate_host(args: argparse.Namespace) -> tuple[float, float]:
    """Host seconds (a step, a decode) in `args.rows`, from the pipeline runs in `args.runs`.

    The pipeline's stages hold `args.stage_layers` layers, a multiple of those measured. Only steps
    without prefill count.
    """
    meta, shapes = load_rows(args.rows)
    layers = int(meta["layers"])
    times, rest = divmod(args.stage_layers, layers)
    if rest or not times:
        raise ValueError(f"stage_layers = {args.stage_layers}: must be a multiple of {layers}")
    fit = fit_shapes(shapes, table_tokens(shapes), args.decode_context_ns * 1e-9 * layers)
    # Over a layer's GEMMs the head is one more, of this many layers' weights.
    head_layers = float(args.vocab_size) * int(meta["hidden"]) / layer_parameters(meta)

    def hidden_s(decodes: float, context: float) -> float:
        shape = BatchShape((), round(decodes), round(decodes), round(context))
        row_s = float(predict_rows(fit, [MeasuredShape(shape, (1.0,))])[0])
        linear_s = float(np.interp(decodes, fit.knots, fit.linear_s))
        return float(row_s * times + linear_s / layers * head_layers)

    gaps: dict[float, list[tuple[float, float]]] = {}
    runs = json.loads((Path(args.runs) / "runs.json").read_text(encoding="utf-8"))
    for run in runs:
        log = Path(args.runs) / f"steps_{run['name']}.jsonl.gz"
        if log.is_file():
            lengths = _lengths(args.lengths, int(run["num_prompts"]), "swapped" in run["lengths"])
            gaps.setdefault(mean_decode_context(lengths), []).extend(decode_gaps(log))
    step_s, decode_s = host_seconds(gaps, hidden_s)
    return step_s / times, decode_s / times


def _lengths(path: str, count: int, swapped: bool) -> list[tuple[int, int]]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)]
    pairs = [(out, prompt) if swapped else (prompt, out) for prompt, out in rows[:count]]
    return [(prompt, min(out, 2000)) for prompt, out in pairs]
