"""A first guess of stage times from a model's configuration: no vLLM."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from vllm_ppbalance.config import PredictorSettings
from vllm_ppbalance.deployment import deployment_of, guessed_model


def guess(**shape):
    text = {"hidden_size": 2560, "num_attention_heads": 20, "num_hidden_layers": 28, **shape}
    model = SimpleNamespace(hf_text_config=SimpleNamespace(**text))
    parallel = SimpleNamespace(pipeline_parallel_size=4, tensor_parallel_size=1)
    config = SimpleNamespace(model_config=model, parallel_config=parallel)
    return guessed_model(config, PredictorSettings()).base(8192)


def test_of_sizes_that_differ_by_layer_or_expert_the_largest_counts():
    """ERNIE-4.5-VL has [1536, 512]: experts for text, and for images."""
    experts = {"intermediate_size": 12288, "num_experts_per_tok": 6}
    mixed = guess(moe_intermediate_size=[1536, 512], **experts)
    assert mixed == guess(moe_intermediate_size=1536, **experts)
    assert mixed < guess(intermediate_size=12288)
    assert guess(intermediate_size=[8192, 16384]) == guess(intermediate_size=16384)


@pytest.mark.parametrize("name", ["intermediate_size", "num_key_value_heads", "head_dim"])
def test_what_is_unset_is_guessed_from_the_rest(name):
    assert guess(**{name: None}) == guess() > 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_parallel_size", 2),
        ("enable_expert_parallel", True),
        ("decode_context_parallel_size", 2),
    ],
)
def test_a_profile_belongs_to_how_the_layers_are_shared_out(name, value):
    def of(**parallel):
        known = {"pipeline_parallel_size": 4, "tensor_parallel_size": 1, "data_parallel_size": 1}
        config = MagicMock(parallel_config=SimpleNamespace(**(known | parallel)))
        found = deployment_of(config, "gpu", "0.32.0", "even")
        return {key: found[key] for key in found if "parallel" in key}

    assert of() != of(**{name: value})
