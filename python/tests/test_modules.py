"""RingDilatedAttention and the presets of it."""

import pytest
import ringattn
import torch

pytestmark = pytest.mark.filterwarnings("ignore::ringattn.HolesWarning")
PRESETS = [
    "RingDilatedAttention",
    "RingDilatedAttentionHybrid",
    "RingDilatedAttentionV3",
    "RingDilatedAttentionV2Collective",
    "RingDilatedAttentionV2",
    "RingAttentionCorrect",
]


@pytest.fixture(autouse=True)
def narrow_recommendation(monkeypatch):
    """As on a machine whose fastest type is bfloat16: no module may compute in it unasked."""
    from ringattn import _lib, modules

    monkeypatch.setattr(_lib.lib, "ra_recommended_dtype", lambda device: _lib.BF16)
    monkeypatch.setattr(modules, "_RECOMMENDED", {"cpu": torch.bfloat16, "cuda": torch.bfloat16}, raising=False)


def inputs(requires_grad=False, **kwargs):
    torch.manual_seed(0)
    return [torch.randn(2, 24, 6, 8, requires_grad=requires_grad, **kwargs) for _ in range(3)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_computes_the_function_of_attention(name):
    pattern = {"dilate_queries": False}
    q, k, v = inputs()
    expected = ringattn.attention(q, k, v, segment_lengths=[8, 24], dilation_rates=[1, 2], is_causal=True, **pattern)
    for ring_size in (None, 1, 3):
        module = getattr(ringattn, name)([8, 24], [1, 2], 0.0, ring_size, **pattern)
        assert module.ring_size == (ring_size or 1)
        found = module(q, k, v, is_causal=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_presets_say_how_queries_and_keys_meet():
    def settings(name):
        module = getattr(ringattn, name)([8], [1])
        return module.schedule, module.query_placement

    assert settings("RingDilatedAttentionHybrid") == settings("RingDilatedAttentionV3") == ("ring", "sharded")
    assert settings("RingDilatedAttentionV2Collective") == ("gather", "sharded")
    assert settings("RingDilatedAttentionV2") == settings("RingAttentionCorrect") == ("auto", "replicated")


def test_presets_take_whole_tensors_and_dilate_keys_and_values_alone():
    for name in PRESETS[1:]:
        module = getattr(ringattn, name)([8], [2])
        assert module.inputs == "full" and module.dilate_queries is False and "inputs=full" in repr(module)
        assert getattr(ringattn, name)([8], [2], dilate_queries=True).dilate_queries is True
    general = ringattn.RingDilatedAttention([8], [2])
    assert general.inputs == "shard" and general.dilate_queries is True
    assert ringattn.RingDilatedAttentionV3(inputs="shard").inputs == "shard"


def peak_growth(function):
    """How many bytes more than before the process holds while the function runs, at most."""
    import pathlib
    import re

    def kilobytes(name):
        return int(re.search(rf"{name}:\s+(\d+)", pathlib.Path("/proc/self/status").read_text()).group(1))

    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kilobytes("VmRSS")
    kept = function()
    assert kept is not None
    return 1024 * (kilobytes("VmHWM") - before)


@pytest.mark.parametrize("name", ["RingDilatedAttentionV2", "RingAttentionCorrect"])
def test_replicated_queries_in_one_process_need_no_memory_for_the_ring(name):
    assert peak_growth(lambda: torch.ones(1 << 24).sum()) > 48 << 20, "the peak of 64 MiB is not seen"
    q, k, v = (torch.randn(1, 2048, 8, 64).half() for _ in range(3))
    found = {}
    for ring_size in (1, 16):
        module = getattr(ringattn, name)(ring_size=ring_size)
        assert module.ring_size == ring_size
        found[ring_size] = peak_growth(lambda: module(q, k, v))
        assert "ranks" not in ringattn.stats()
        torch.testing.assert_close(module(q, k, v), ringattn.attention(q, k, v), rtol=0, atol=0)
    assert found[16] <= found[1] + (8 << 20), found  # 16 states and results of 2 MiB and more would be far beyond


@pytest.mark.parametrize("name, schedule", [("RingDilatedAttentionV3", "ring"), ("RingDilatedAttentionV2Collective", "gather")])
def test_a_preset_really_runs_its_schedule(name, schedule):
    getattr(ringattn, name)(ring_size=2)(*inputs())
    assert ringattn.stats()["schedule"] == schedule


def test_the_configuration_of_the_notes_is_taken_as_it_is():
    module = ringattn.RingDilatedAttentionHybrid(
        segment_lengths=[8, 16, 24],
        dilation_rates=[1, 2, 4],
        ring_size=2,
        enable_memory_pool=True,
        use_pattern_cache=True,
        use_flash_attention=True,
        dtype=torch.float32,
        device="cpu",
        dropout=0.1,
        bucket_size=4,
    )
    assert module(*inputs(), is_causal=True).shape == (2, 24, 6, 8)


def test_ring_attention_correct_takes_a_ring_size_per_call():
    q, k, v = inputs(requires_grad=True)
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    module = ringattn.RingAttentionCorrect()
    for ring_size in (1, 2, 4, 8):
        torch.testing.assert_close(module(q, k, v, ring_size), expected, rtol=1e-3, atol=1e-4)
    assert module.ring_size == 1
    for wrong in (True, 0):
        with pytest.raises(ValueError, match="ring_size"):
            module(q, k, v, wrong)
    with pytest.raises(ValueError, match="inputs must be full"):
        ringattn.RingAttentionCorrect(inputs="shard")


def test_dropout_acts_in_training_only():
    q, k, v = inputs()
    module = ringattn.RingDilatedAttention(dropout=0.5)
    expected = ringattn.attention(q, k, v)
    assert not torch.allclose(module(q, k, v), expected)
    assert torch.equal(module(q, k, v, seed=3), ringattn.attention(q, k, v, dropout_p=0.5, seed=3))
    assert torch.equal(module.eval()(q, k, v), expected)


@pytest.mark.parametrize("group", [None, 2])
def test_stats_count_a_repeated_call_as_a_cache_hit(group):
    module = ringattn.RingDilatedAttention(group=group)
    q, k, v = (x[:, :19].contiguous() for x in inputs())
    module(q, k, v)
    before = ringattn.stats()
    for _ in range(3):
        module(q, k, v)
    assert ringattn.stats()["cache_hits"] - before["cache_hits"] == 3 * (group or 1)
    assert ringattn.stats()["cache_misses"] == before["cache_misses"]


def test_use_flash_attention_false_runs_the_scalar_kernel():
    q, k, v = inputs()
    ringattn.RingDilatedAttention(use_flash_attention=False)(q, k, v)
    assert ringattn.stats()["kernel"] == "scalar"
    ringattn.RingDilatedAttention()(q, k, v)
    best = next(kernel["name"] for kernel in ringattn.info()["kernels"] if kernel["available"])
    assert ringattn.stats()["kernel"] == best


@pytest.mark.parametrize("group", [None, 2])
def test_memory_pool_and_pattern_cache_switches_do_what_they_say(group):
    q, k, v = inputs()
    kept = ringattn.RingDilatedAttention(group=group)
    other = q[:, :11].contiguous()
    for _ in range(3):
        kept(q, k, v)
        kept(other, other, other)
    assert ringattn.stats()["cache_hits"] > 0
    for switch in ("enable_memory_pool", "use_pattern_cache"):
        fresh = ringattn.RingDilatedAttention(group=group, **{switch: False})
        for _ in range(3):
            fresh(q, k, v)
            fresh(other, other, other)
        assert ringattn.stats()["cache_hits"] == 0 and ringattn.stats()["pool_hits"] == 0
        torch.testing.assert_close(fresh(q, k, v), kept(q, k, v), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtype_none_is_the_type_of_the_inputs(dtype):
    assert ringattn.recommended_dtype() == "bfloat16"
    q, k, v = inputs(dtype=dtype)
    for name in PRESETS:
        out = getattr(ringattn, name)()(q, k, v)
        assert out.dtype == dtype and torch.equal(out, ringattn.attention(q, k, v, schedule="ring"))
    with pytest.raises(ValueError, match="dtypes"):
        ringattn.RingDilatedAttention()(q, k.to(torch.float32 if dtype != torch.float32 else torch.float64), v)


def test_a_given_dtype_is_computed_in_and_converted_back():
    q, k, v = inputs(requires_grad=True)
    out = ringattn.RingDilatedAttention(dtype=torch.bfloat16)(q, k, v)
    assert out.dtype == torch.float32
    assert torch.equal(out, ringattn.attention(*(x.bfloat16() for x in (q, k, v))).float())
    out.sum().backward()
    assert q.grad.dtype == torch.float32
    with pytest.raises(ValueError, match="query has dtype torch.int64"):  # the result would be cut to integers
        ringattn.RingDilatedAttention(dtype=torch.float32)(*(x.detach().long() for x in (q, k, v)))


def test_a_given_dtype_is_computed_in_under_autocast_too():
    q, k, v = inputs(dtype=torch.bfloat16)
    module = ringattn.RingDilatedAttention(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        out = module(q, k, v)
    assert torch.equal(out, ringattn.attention(*(x.float() for x in (q, k, v))).bfloat16())
    assert module(*(x.to("meta") for x in (q, k, v))).dtype == torch.bfloat16


def test_gradients_flow_through_every_preset():
    for name in PRESETS:
        q, k, v = inputs(requires_grad=True)
        getattr(ringattn, name)(ring_size=2)(q, k, v).square().sum().backward()
        again = inputs(requires_grad=True)
        ringattn.attention(*again).square().sum().backward()
        for a, b in zip((q, k, v), again):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_a_module_can_be_copied_pickled_and_printed():
    import copy
    import io

    module = ringattn.RingDilatedAttention([8, 24], [1, 2], dilate_queries=False, ring_size=2)
    q, k, v = inputs()
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert torch.equal(other(q, k, v), module(q, k, v))
    assert "segment_lengths=[8, 24]" in repr(module) and not list(module.parameters()) and not module.state_dict()


@pytest.mark.parametrize(
    "options, match",
    [
        ({"segment_lengths": [8]}, "dilation_rates is missing"),
        ({"segment_lengths": [8], "dilation_rates": [1, 2]}, "2"),
        ({"dropout": 1.5}, "dropout"),
        ({"ring_size": 0}, "ring_size"),
        ({"ring_size": 3, "group": 2}, "group has 2 ranks"),
        ({"dtype": torch.int32}, "dtype"),
        ({"layout": "diagonal"}, "layout"),
        ({"schedule": "slow"}, "schedule"),
        ({"bucket_size": -4}, "bucket"),
        ({"inputs": "half"}, "inputs is 'half'"),
    ],
)
def test_wrong_arguments_are_found_on_construction(options, match):
    with pytest.raises(ValueError, match=match):
        ringattn.RingDilatedAttention(**options)


def test_an_argument_that_is_not_supported_raises():
    with pytest.raises(TypeError, match="attn_mask"):
        ringattn.RingDilatedAttention(attn_mask=None)
    for name in PRESETS:
        module = getattr(ringattn, name)()
        with pytest.raises(ValueError, match="attn_mask is not supported: .*window"):
            module(*inputs(), attn_mask=torch.zeros(24, 24))
        with pytest.raises(TypeError, match="is_casual"):
            module(*inputs(), is_casual=True)


def test_inputs_on_another_device_than_the_modules_raise():
    with pytest.raises(ValueError, match="cpu and the module on cuda"):
        ringattn.RingDilatedAttention(device="cuda")(*inputs())


def test_check_compares_in_process_ranks_and_names_what_differs():
    module = ringattn.RingDilatedAttention([8, 24], [1, 2], dilate_queries=False)
    sample = tuple(inputs())
    report = ringattn.check(module, sample, group=3, is_causal=True)
    assert report and report.ok and report.ranks == 3 and "all tensors agree" in str(report)
    assert [tensor.name for tensor in report.tensors] == ["output", "input 0 gradient", "input 1 gradient", "input 2 gradient"]
    assert module.group is None

    class Wrong(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, q, k, v):
            return self.inner(q, k, v) * (1.0 if self.inner.group is None else 1.01)

    report = ringattn.check(Wrong(), sample, group=2)
    assert not report and "output" in report.differs and "differs in output" in str(report)
    with pytest.raises(ValueError, match="none of this package's"):
        ringattn.check(torch.nn.Linear(2, 2), torch.zeros(1, 2, 2), group=2)
    with torch.no_grad():  # the gradients are compared all the same
        assert "input 0 gradient" in str(ringattn.check(Wrong(), sample, group=2))


def test_check_leaves_a_module_as_it_was():
    preset = ringattn.RingDilatedAttentionHybrid([8, 24], [1, 2])
    dropout = torch.nn.Dropout(0.5).eval()  # frozen, in a module that trains

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.dropout = preset, dropout

        def forward(self, q, k, v):
            return self.dropout(self.attention(q, k, v))

    module = Whole()
    dropout.eval()
    before = [dict(part.__dict__) for part in module.modules()]
    assert ringattn.check(module, tuple(inputs()), group=2)
    assert [dict(part.__dict__) for part in module.modules()] == before
    assert module.training and not dropout.training and preset._all_processes  # of torch.distributed, once it is started


def test_switches_are_true_or_false():
    for name in ("enable_memory_pool", "use_pattern_cache", "use_flash_attention"):
        with pytest.raises(ValueError, match=f"{name} is 'False'; it must be True or False"):
            ringattn.RingDilatedAttention(**{name: "False"})
