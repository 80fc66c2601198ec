"""The boundary: what is refused, by which name, with what advice; and that nothing changed."""

from __future__ import annotations

import inspect
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import inertia_fx
from inertia_fx import errors
from tests.common import models


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llama()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 1.0}, r"ratio=1.0 is outside \[0, 1\)"),
        ({"ratio": -0.1}, r"ratio=-0.1 is outside \[0, 1\)"),
        ({"ratio": float("nan")}, "ratio=nan is not a finite number"),
        ({"ratio": "most"}, "ratio='most' is not a finite number"),
        ({"ratio": None}, "ratio=None is not a number"),
        ({"ratio": True}, "ratio=True is not a number"),
        ({"ratio": 0.9, "budget": 100}, "ratio=0.9 and budget=100 both say"),
        ({"budget": 0}, "budget=0 is below 1"),
        ({"budget": 2.5}, "budget=2.5 is not a whole number"),
        ({"alpha": 1.0}, r"alpha=1.0 is outside \[0, 1\)"),
        ({"alpha": -0.2}, r"alpha=-0.2 is outside \[0, 1\)"),
        ({"alpha": float("nan")}, r"alpha=nan is outside \[0, 1\)"),
        ({"alpha": "0.8"}, "alpha='0.8' is not a number"),
        ({"alpha_time": 1.0}, r"alpha_time=1.0 is outside \[0, 1\)"),
        ({"alpha_layer": 1.1}, r"alpha_layer=1.1 is outside \[0, 1\]"),
        ({"alpha_time": 0.5, "aggregator": "cumulative"}, "alpha_time belongs to aggregator='ema'"),
        ({"refresh_every": 0}, "refresh_every=0 is below 1"),
        ({"refresh_every": 1.5}, "refresh_every=1.5 is not a whole number"),
        ({"evict_after": 0}, "evict_after=0 is below 1"),
        ({"pool_width": 4}, "pool_width=4 is even.*Use 3 or 5"),
        ({"pool_width": 0}, "pool_width=0 is below 1"),
        ({"min_budget": 0}, "min_budget=0 is below 1"),
        ({"aggregator": "mean"}, "aggregator='mean' is unknown: choose one of 'ema', 'cumulative', 'single_step'"),
        ({"scorer": "keys"}, "scorer='keys' is unknown"),
        ({"protect_first": -1}, "protect_first=-1 is below 0"),
        ({"protect_first": 40, "protect_recent": 30}, "70 tokens do not fit into min_budget=64"),
        ({"budget": 3, "protect_recent": 4}, "4 tokens do not fit into budget=3"),
        ({"backend": "inductr"}, "backend='inductr' is unknown"),
        ({"backend": "eager", "options": {"freezing": True}}, "Inductor's"),
        ({"mode": "default", "options": {"freezing": True}}, "exclude each other"),
    ],
)
def test_bad_arguments(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message) as caught:
        inertia_fx.compile(model, **arguments)
    assert isinstance(caught.value, ValueError)


def test_the_signature_is_the_promised_one() -> None:
    parameters = inspect.signature(inertia_fx.compile).parameters
    assert str(inspect.signature(inertia_fx.compile).replace(return_annotation=inspect.Signature.empty)).startswith(
        "(model"
    )
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "model"}
    assert defaults == {
        "ratio": 0.9, "alpha": 0.8, "refresh_every": 1, "evict_after": 1, "pool_width": 1, "budget": None,
        "min_budget": 64, "aggregator": "ema", "scorer": "attention", "alpha_time": None, "alpha_layer": None,
        "protect_first": 0, "protect_recent": 0, "backend": "inductor", "mode": None, "options": None, "regions": True,
        "warm_start": False,
    }  # fmt: skip
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in defaults)
    with pytest.raises(TypeError, match="unexpected keyword"):
        inertia_fx.compile(object(), ratios=0.9)  # type: ignore[call-arg]


@given(tenths=st.integers(0, 9), prompt=st.integers(0, 10**6))
def test_budget_is_exact_decimal_arithmetic(tenths: int, prompt: int) -> None:
    ratio = tenths / 10
    expect = (10 - tenths) * prompt // 10
    for written in (ratio, str(ratio), Fraction(tenths, 10), Decimal(str(ratio)), numpy.float64(ratio)):
        assert inertia_fx.Config(ratio=written, min_budget=1).budget_of(prompt) == max(1, expect)


def test_budget_examples() -> None:
    assert inertia_fx.Config().budget_of(1000) == 100  # floor((1 - 0.9) * 1000) in floats is 99
    assert inertia_fx.Config().budget_of(10) == 64
    assert inertia_fx.Config(min_budget=1).budget_of(5) == 1
    assert inertia_fx.Config(budget=7).budget_of(10**6) == 7
    assert repr(inertia_fx.Config()) == "Config(ratio=0.9 (evicted))"
    assert repr(inertia_fx.Config(budget=7, alpha=0.5)) == "Config(alpha=0.5, budget=7)"


@given(r=st.one_of(st.none(), st.integers(1, 50)), steps=st.integers(1, 200))
def test_number_of_refreshes(r: int | None, steps: int) -> None:
    config = inertia_fx.Config(refresh_every=r)
    refreshes = [step for step in range(1, steps + 1) if config.refreshes_at(step)]
    assert refreshes[0] == 1
    assert len(refreshes) == (1 if r is None else -(-steps // r))


# ---------------------------------------------------------------------- models


def test_not_a_model() -> None:
    with pytest.raises(errors.UnsupportedModelError, match="Linear is not a transformers model"):
        inertia_fx.compile(torch.nn.Linear(2, 2))


def test_encoder_decoder() -> None:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    with pytest.raises(errors.UnsupportedModelError, match="encoder-decoder"):
        inertia_fx.compile(transformers.T5ForConditionalGeneration(config))


def test_no_attention() -> None:
    with pytest.raises(errors.UnsupportedModelError, match="nothing to evict"):
        inertia_fx.compile(models.tiny("mamba"))


def test_sliding_layers_are_refused_by_name() -> None:
    with pytest.raises(errors.UnsupportedModelError, match=r"layer 0 caches in a DynamicSlidingWindowLayer"):
        inertia_fx.compile(models.tiny("gemma3_text"))


@pytest.mark.parametrize("family", ["bloom"])
def test_alibi(family: str) -> None:
    with pytest.raises(errors.PositionBiasError, match="ALiBi"):
        inertia_fx.compile(models.tiny(family))


def test_falcon_with_alibi() -> None:
    config = transformers.FalconConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True
    )
    with pytest.raises(errors.PositionBiasError, match="ALiBi"):
        inertia_fx.compile(transformers.FalconForCausalLM(config))


def test_attention_that_hides_its_probabilities() -> None:
    with pytest.raises(errors.UnsupportedAttentionError, match="attn_implementation='flex_attention' hides"):
        inertia_fx.compile(models.llama(attention="flex_attention"))


def test_a_replaced_forward(model: Any) -> None:
    patched = models.llama()
    patched.forward = patched.forward
    with pytest.raises(errors.UnsupportedModelError, match="replaced on the instance"):
        inertia_fx.compile(patched)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_latent_attention_is_refused_at_the_first_step_and_nothing_is_lost(attention: str) -> None:
    """DeepSeek caches latents, from which attention computes its keys: named with layer, node and reason."""
    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=2, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, attn_implementation=attention,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    compiled = inertia_fx.compile(model, backend="eager")
    cache = inertia_fx.InertiaCache()
    ids = torch.tensor([models.prompt(20)]) % 64
    with torch.no_grad():
        compiled(ids, past_key_values=cache)
        with pytest.raises(errors.UnsupportedAttentionError) as caught:
            compiled(ids[:, :1], past_key_values=cache)
    assert caught.value.layer == 0
    assert caught.value.node is not None
    assert cache.get_seq_length() == 20
    assert cache.retained_positions()[0].tolist() == list(range(20))


# ---------------------------------------------------------------------- caches


def test_caches_of_another_kind(model: Any) -> None:
    compiled = inertia_fx.compile(model, backend="eager")
    ids = torch.tensor([models.prompt(8)])
    filled = model(ids).past_key_values
    for cache in (filled, transformers.DynamicCache(), ((None, None),)):
        with pytest.raises(errors.CacheError, match="keeps its tokens in an InertiaCache"):
            compiled(ids, past_key_values=cache)
    assert filled.get_seq_length() == 8


def test_a_cache_of_another_model_batch_or_outside(model: Any) -> None:
    first, second = (inertia_fx.compile(model, backend="eager") for _ in range(2))
    ids = torch.tensor([models.prompt(8)])
    cache = inertia_fx.InertiaCache()
    with torch.no_grad():
        first(ids, past_key_values=cache)
        with pytest.raises(errors.CacheError, match="filled by another model"):
            second(ids[:, :1], past_key_values=cache)
        with pytest.raises(errors.CacheError, match=r"holds 1 sequence\(s\) and the forward has 2"):
            first(ids[:, :1].repeat(2, 1), past_key_values=cache)
        with pytest.raises(errors.CacheError, match=r"holds 1 sequence\(s\) and the forward has 2"):
            first(ids.repeat(2, 1), past_key_values=cache)
        with pytest.raises(errors.CacheError, match="does not drive it"):
            model(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 8
        first(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 9
        cache.reset()
        assert (cache.get_seq_length(), cache.nbytes, cache.budget, cache.retained_positions()) == (0, 0, [], [])
        second(ids.repeat(2, 1), past_key_values=cache)
        assert cache.rows == 2


def test_undoing_is_refused() -> None:
    cache = inertia_fx.InertiaCache()
    for count in (-1, -7, 3):
        with pytest.raises(errors.UndoError, match="cannot be undone"):
            cache.crop(count)
    assert cache.crop(0) is None
    assert not cache.is_croppable
    assert not cache.is_compileable


def test_cache_takes_a_config_only() -> None:
    with pytest.raises(errors.ConfigError, match=r"not an inertia_fx\.Config"):
        inertia_fx.InertiaCache(transformers.LlamaConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_outputs_that_a_step_does_not_have(name: str) -> None:
    compiled = inertia_fx.compile(models.llama(attention="eager"), backend="eager")
    ids = torch.tensor([models.prompt(8)])
    cache = inertia_fx.InertiaCache()
    with torch.no_grad():
        prompt = compiled(ids, past_key_values=cache, **{name: True})
        assert len(prompt.attentions if name == "output_attentions" else prompt.hidden_states) >= 2
        with pytest.raises(errors.OutputError, match=f"{name}=True on a decode step"):
            compiled(ids[:, :1], past_key_values=cache, **{name: True})
        assert cache.get_seq_length() == 8
        setattr(compiled.config, name, True)
        with pytest.raises(errors.OutputError):
            compiled(ids[:, :1], past_key_values=cache)
        setattr(compiled.config, name, False)
        assert compiled(ids[:, :1], past_key_values=cache, **{name: False}).logits.shape == (1, 1, models.VOCABULARY)


def test_training_over_a_bounded_cache(model: Any) -> None:
    compiled = inertia_fx.compile(models.llama(), backend="eager")
    cache = inertia_fx.InertiaCache()
    ids = torch.tensor([models.prompt(8)])
    compiled(ids, past_key_values=cache)
    compiled.train()
    with pytest.raises(errors.TrainingError, match=r"model.eval\(\)"):
        compiled(ids[:, :1], past_key_values=cache)
    own = compiled(ids).past_key_values
    assert type(own) is transformers.DynamicCache
    compiled(ids[:, :1], past_key_values=own)
    assert own.get_seq_length() == 9


def test_masks_that_hide_what_is_padding(model: Any) -> None:
    compiled = inertia_fx.compile(model, backend="eager")
    ids = torch.tensor([models.prompt(8)])
    cache = inertia_fx.InertiaCache()
    with pytest.raises(errors.CacheError, match="must be 2-D"):
        compiled(ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool), past_key_values=cache)
    with pytest.raises(errors.CacheError, match="covers 5 tokens, but 0 are cached and 8 are new: pass 8"):
        compiled(ids, attention_mask=torch.ones(1, 5), past_key_values=cache)
    with pytest.raises(errors.CacheError, match="has 2 rows and the forward 1"):
        compiled(ids, attention_mask=torch.ones(2, 8), past_key_values=cache)
    with pytest.raises(errors.CacheError, match="A prompt without tokens"):
        compiled(ids[:, :0], past_key_values=cache)
    with pytest.raises(errors.CacheError, match="Neither input_ids nor inputs_embeds"):
        compiled(past_key_values=cache)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        compiled(ids.repeat(2, 1), attention_mask=torch.tensor([[1] * 8, [0] * 8]), past_key_values=cache)
        with pytest.raises(errors.CacheError, match="Row 1 of the prompt was padding alone"):
            compiled(ids[:, :1].repeat(2, 1), past_key_values=cache)
    cache.reset()
    other = inertia_fx.compile(model, backend="eager")
    with torch.no_grad():
        other(ids, past_key_values=cache)  # what was refused left no owner behind
        with pytest.raises(errors.CacheError, match="covers 3 tokens, but 8 are cached and 1 are new: pass 9"):
            other(ids[:, :1], attention_mask=torch.ones(1, 3), past_key_values=cache)


def test_generate_with_the_new_question_alone_says_what_is_wanted(model: Any) -> None:
    compiled = inertia_fx.compile(model, backend="eager")
    cache = inertia_fx.InertiaCache()
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "past_key_values": cache}
    compiled.generate(**models.pad([models.prompt(20)]), **options)
    with pytest.raises(errors.CacheError, match="wants the whole text"):
        compiled.generate(**models.pad([models.prompt(5)]), **options)
    assert cache.get_seq_length() == 22


def test_a_model_that_changes_its_dtype_needs_a_new_cache() -> None:
    compiled = inertia_fx.compile(models.llama(), backend="eager")
    ids = torch.tensor([models.prompt(8)])
    cache = inertia_fx.InertiaCache()
    with torch.no_grad():
        compiled(ids, past_key_values=cache)
        compiled.to(torch.bfloat16)
        with pytest.raises(errors.CacheError, match=r"has become torch\.bfloat16"):
            compiled(ids[:, :1], past_key_values=cache)
        cache.reset()
        compiled(ids, past_key_values=cache)
        compiled(ids[:, :1], past_key_values=cache)


def test_reset_forgets_the_first_models_settings(model: Any) -> None:
    cache = inertia_fx.InertiaCache()
    ids = torch.tensor([models.prompt(40)])
    with torch.no_grad():
        for ratio, budget in ((0.7, 12), (0.5, 20)):
            inertia_fx.compile(model, ratio=ratio, min_budget=1, backend="eager")(ids, past_key_values=cache)
            assert cache.budget == [budget]
            cache.reset()


def test_many_batch_sizes_share_a_compile(model: Any) -> None:
    compiled = inertia_fx.compile(model, backend="eager")
    with torch.no_grad():
        for rows in range(1, 13):
            cache = inertia_fx.InertiaCache()
            ids = torch.tensor([models.prompt(8)] * rows)
            compiled(ids, past_key_values=cache)
            compiled(ids[:, :1], past_key_values=cache)
            assert [row.tolist() for row in cache.retained_positions()] == [list(range(9))] * rows


class Fragile:
    """An inner compiler that runs the graph node by node, and fails in the middle when told to."""

    fail_at: float | None = None
    """Fraction of the graph's nodes that still run."""

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        outer, position = self, {node: index for index, node in enumerate(gm.graph.nodes)}

        class Run(torch.fx.Interpreter):
            def run_node(self, node: torch.fx.Node) -> Any:
                if outer.fail_at is not None and position[node] >= outer.fail_at * len(position):
                    raise RuntimeError("out of memory")
                return super().run_node(node)

        return lambda *args: Run(gm).run(*args)


def test_an_exception_in_the_middle_leaves_the_cache_as_it_was() -> None:
    inner = Fragile()
    compiled = inertia_fx.compile(models.llama(), ratio=0.7, min_budget=5, backend=inner)
    ids, token = torch.tensor([models.prompt(40)]), torch.tensor([[9]])

    def broken(*args: Any) -> None:
        raise RuntimeError("out of memory")

    def run(fail_at: float | None) -> list[Any]:
        cache = inertia_fx.InertiaCache()
        trace = []
        for feed in (ids, token, token, token, ids[:, :7], token, token):
            if fail_at is not None:
                inner.fail_at = fail_at
                handle = compiled.model.layers[1].mlp.register_forward_pre_hook(broken)
                with pytest.raises(RuntimeError, match="out of memory"):
                    compiled(feed, past_key_values=cache)
                handle.remove()
                inner.fail_at = None
            logits = compiled(feed, past_key_values=cache).logits[0, -1].tolist()
            trace.append((logits, cache.get_seq_length(), cache.budget, cache.retained_positions()[0].tolist()))
        return trace

    with torch.no_grad():
        expect = run(None)
        for fail_at in (0.2, 0.5, 0.8, 0.95):
            assert run(fail_at) == expect


def test_a_disabled_torch_compile_is_an_error_not_another_eviction(model: Any) -> None:
    compiled = inertia_fx.compile(model, backend="eager")
    cache = inertia_fx.InertiaCache()
    ids = torch.tensor([models.prompt(8)])
    with torch.no_grad():
        compiled(ids, past_key_values=cache)
        with torch.compiler.set_stance("force_eager"), pytest.raises(errors.CompileDisabledError, match="switched off"):
            compiled(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 8
        compiled(ids[:, :1], past_key_values=cache)
        assert cache.retained_positions()[0].tolist() == list(range(9))


def test_recompile_limit_is_an_error_of_ours(model: Any) -> None:
    compiled = inertia_fx.compile(model, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        for rows in (1, 2):
            cache = inertia_fx.InertiaCache()
            ids = torch.tensor([models.prompt(8)] * rows)
            compiled(ids, past_key_values=cache)
            if rows == 1:
                compiled(ids[:, :1], past_key_values=cache)
            else:
                with pytest.raises(errors.RecompileError, match="so many batch sizes"):
                    compiled(ids[:, :1], past_key_values=cache)


def test_messages_of_an_attention_refusal() -> None:
    error = errors.UnsupportedAttentionError(3, "softmax_3", "it is odd", "File x.py, line 1")
    assert str(error).startswith(
        "inertia_fx does not understand the attention of cache layer 3 at graph node 'softmax_3': it is odd."
    )
    assert "x.py" in str(error)
    assert "the decode graph" in str(errors.UnsupportedAttentionError(None, None, "it is odd"))
