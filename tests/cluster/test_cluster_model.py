"""The figures on paper against torch's FLOP counter, against `zbpp memory`, and against closed forms."""

import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers.pages import ROOT
from zbpp.cluster import Gpu, Hardware, Mesh, ModelSizes, Question, predicted_step, search, sizes_of_node
from zbpp.cluster.hardware import BetweenLink, InsideLink
from zbpp.cluster.layer_work import Kernels, head, layer, model_flops
from zbpp.cluster.search import _candidates
from zbpp.cluster.stage_costs import Run, costs_of
from zbpp.cluster.step import time_and_memory
from zbpp.config import config_folder, register, typed
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.planning import plan
from zbpp.schedule import Costs, simulate

FAST = 1e6  # GB/s, the most that a file may say

GPT = {
    "_target_": "zbpp.models.gpt.Gpt",
    "vocab_size": 256,
    "num_layers": 8,
    "hidden_size": 64,
    "num_heads": 4,
}
GPT["sequence_length"] = 32
LLAMA = {**GPT, "_target_": "zbpp.models.llama.Llama", "num_kv_heads": 2, "intermediate_size": 192}


def hardware(nodes: int = 1, gpus: int = 1, **values: float) -> Hardware:
    gpu = {"peak_tflops": 100.0, "achieved": 0.5, "memory": 80.0, "memory_bandwidth": 1000.0}
    gpu |= {name: value for name, value in values.items() if name in gpu}
    link = {"bandwidth": values.get("bandwidth", 100.0), "latency": values.get("latency", 5.0)}
    return Hardware(
        nodes=nodes,
        gpus_per_node=gpus,
        gpu=Gpu(**gpu),
        inside=InsideLink(**link),
        between=BetweenLink(**link),
    )


@pytest.mark.parametrize("node, kind", [(GPT, Gpt), (LLAMA, Llama)], ids=["gpt", "llama"])
def test_flops_and_parameters_are_those_that_torch_counts(node: dict, kind: type) -> None:
    """F, and B and W together, of a whole model on the meta device, where attention is not fused."""
    sizes, tokens = sizes_of_node(node), 2 * 32
    with torch.device("meta"):
        stage = kind(**{name: value for name, value in node.items() if name != "_target_"}).build_stage(0, 1)
        x = torch.zeros(2, 32, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        y = stage(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    kernels = Kernels(is_fused=False)
    parts = [layer(sizes, tokens, 1, kernels)] * sizes.num_layers + [head(sizes, tokens, 1, kernels)]
    assert sum(part.f.products for part in parts) == forward.get_total_flops()
    both = sum(part.b.products + part.w.products for part in parts)
    assert both == backward.get_total_flops()
    assert sizes.parameters == sum(each.numel() for each in stage.parameters())


def test_tensor_parallel_ranks_share_the_flops_and_matrices() -> None:
    sizes, kernels = sizes_of_node(LLAMA), Kernels()
    whole, part = layer(sizes, 64, 1, kernels), layer(sizes, 64, 2, kernels)
    for op in ("f", "b", "w"):
        assert 2 * getattr(part, op).products == getattr(whole, op).products
    assert 2 * part.largest == whole.largest


@pytest.mark.parametrize(
    "tensor, shard, switches",
    [
        (2, 1, {}),
        (1, 2, {}),
        (1, 1, {"recompute": True}),
        (2, 1, {"sequence_parallel": True}),
        (2, 1, {"sequence_parallel": True, "recompute": True}),
    ],
)
def test_the_memory_is_what_zbpp_memory_predicts(tensor: int, shard: int, switches: dict) -> None:
    """A GPT on a node: static memory to 1 %, what F leaves to 2 %, what B leaves to 5 %, the peak to 10 %."""
    from hydra import compose, initialize_config_dir

    from zbpp.prediction.predictor import predict

    register()
    given = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "sequence_length": 128}
    overrides = ["model=gpt_tiny", "data=stdlib", "schedule=zb_h1", "num_microbatches=4"]
    overrides += [
        "microbatch_size=2",
        "precision=mixed_bfloat16",
        f"parallel.num_processes={2 * tensor * shard}",
    ]
    overrides += [f"parallel.tensor={tensor}", f"parallel.shard={shard}"]
    overrides += [f"memory.recompute={'block' if switches.get('recompute') else 'none'}"]
    overrides += ["model.sequence_parallel=true"] if switches.get("sequence_parallel") else []
    overrides += [f"model.{name}={value}" for name, value in given.items()]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = typed(compose("train", overrides))
    expected = predict(config)
    sizes = sizes_of_node({"_target_": "zbpp.models.gpt.Gpt", **given, "vocab_size": 256})
    mesh = Mesh(pipeline=2, shard=shard, tensor=tensor)
    run = Run(sizes, hardware(1, mesh.num_gpus), mesh, 2, **switches)
    counts = costs_of(run, [0, 1]).costs.per_stage(2)
    for stage, own in enumerate(expected.stages):
        held = own.saved + own.x  # received messages are not counted as saved there
        assert counts.held["saved"][stage] == pytest.approx(held, rel=0.02)
        assert counts.held["deferred"][stage] == pytest.approx(own.deferred + own.g, rel=0.05)
        assert counts.static[stage] == pytest.approx(own.static, rel=0.01)
    step = predicted_step(run, "zb_h1", 4)
    assert step.memory == pytest.approx(max(each.peak for each in expected.ranks), rel=0.10)


def test_one_gpu_takes_the_flops_over_what_it_achieves() -> None:
    """A memory that is fast enough leaves the products alone; fused attention computes its scores again."""
    sizes = replace(sizes_of_node(LLAMA), hidden=4096, head_size=1024, intermediate=16384, sequence=1024)
    run = Run(sizes, hardware(memory_bandwidth=FAST), Mesh(), 2)
    step = predicted_step(run, "1f1b", 4)
    tokens = 4 * 2 * 1024
    again = sizes.num_layers * 0.5 * 2 * sizes.query * sizes.sequence * tokens
    assert step.time == pytest.approx((model_flops(sizes, tokens) + again) / (100e9 * 0.5), rel=0.02)
    assert step.mfu == pytest.approx(0.5, rel=0.03)
    for name in ("links", "bubble", "gradient reduction", "tensor all-reduces"):
        assert step.losses[name] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("num", [8, 40])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v", "interleaved_1f1b"])
def test_links_that_cost_nothing_leave_the_simulated_span(schedule: str, num: int) -> None:
    """40 microbatches are more than are simulated: the steady state goes on."""
    run = Run(sizes_of_node(GPT), hardware(2, 2, bandwidth=FAST, latency=0), Mesh(pipeline=4), 2)
    timetable = plan(schedule, 4, num)
    numbers = costs_of(run, timetable.rank_of).costs.numbers
    expected = simulate(timetable, Costs(f=numbers["f"], b=numbers["b"], w=numbers["w"])).makespan
    step = predicted_step(run, schedule, num)
    assert step.time - step.losses["optimizer"] == pytest.approx(expected, rel=1e-4)


def test_slow_links_and_split_layers_are_named_as_the_limit() -> None:
    sizes = sizes_of_node(GPT)
    slow = hardware(2, 2, bandwidth=0.001)
    names = {
        "links": Mesh(pipeline=4),
        "gradient reduction": Mesh(replicate=4),
        "tensor all-reduces": Mesh(tensor=4),
    }
    for name, mesh in names.items():
        assert predicted_step(Run(sizes, slow, mesh), "1f1b", 32).limit.startswith(name)
    fast = hardware(2, 2, bandwidth=FAST, latency=0)
    assert predicted_step(Run(sizes, fast, Mesh(pipeline=4)), "1f1b", 4).limit.startswith("bubble")


def test_messages_inside_a_node_take_the_link_inside() -> None:
    """Two nodes of four GPUs, p = 4 with two parts of layers each: ranks 1 and 2 stand on different nodes."""
    cluster = hardware(2, 4)
    cluster = replace(cluster, between=BetweenLink(bandwidth=1, latency=100))
    run = Run(sizes_of_node(LLAMA), cluster, Mesh(pipeline=4, tensor=2), 1)
    comm = costs_of(run, range(4)).costs.per_stage(4).comm
    size = 64 * 32 * 2
    inside, between = 0.005 + size / 100e6, 0.1 + size / 1e6
    assert comm == pytest.approx([inside, between, between, inside])


def test_no_way_that_the_search_leaves_out_is_faster() -> None:
    question = Question(
        sizes=sizes_of_node({**LLAMA, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 4}),
        hardware=hardware(2, 4, latency=20.0),
        batch=64,
        top=3,
    )
    answer = search(question)
    every = [
        time_and_memory(each.run, each.schedule, each.num_microbatches)[0] for each in _runnable(question)
    ]
    assert [step.time for step in answer.steps] == pytest.approx(sorted(every)[:3])
    assert answer.simulated < len(every)


def _runnable(question: Question) -> list:
    found = []
    for each in _candidates(question, False):
        try:
            time_and_memory(each.run, each.schedule, each.num_microbatches)
            found.append(each)
        except ValueError:
            pass
    return found


def test_lean_layers_keep_the_inputs_of_norms_and_of_the_activation_only() -> None:
    """Two norms' outputs fewer, and two of the gated MLP's four tensors; B moves more memory, F does not."""
    sizes = sizes_of_node(LLAMA)
    plain, lean = (layer(sizes, 64, 1, Kernels(is_lean=is_lean)) for is_lean in (False, True))
    assert plain.saved - lean.saved == (2 * sizes.hidden + 2 * sizes.intermediate) * 2 * 64
    assert lean.f == plain.f
    assert lean.b.traffic > plain.b.traffic
    assert lean.deferred == plain.deferred


def test_where_nothing_fits_the_least_memory_is_named() -> None:
    sizes = ModelSizes(
        num_layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        head_size=128,
        intermediate=28672,
        vocab=128256,
        sequence=4096,
    )
    answer = search(Question(sizes, hardware(1, 8), batch=16))
    assert answer.steps == []
    assert "nothing fits in 80 GiB a GPU, with recompute neither: " in answer.why
    assert "147.9 GiB" in answer.why  # 18 bytes for each of 70.55 B parameters, on 8 GPUs
    assert answer.why.endswith("; take more GPUs, or --precision bfloat16")
    given = {"batch": 16, "degrees": {"tensor": 8}, "precision": "bfloat16", "recompute": False}
    told = search(Question(sizes, hardware(1, 8), **given)).why
    assert "with recompute" not in told
    assert told.endswith("; take more GPUs, or other --degrees, or drop --no-recompute")


def test_the_published_runs_in_the_results_are_what_the_script_prints(capsys: pytest.CaptureFixture) -> None:
    sys.path.insert(0, str(ROOT / "scripts/dev"))
    try:
        import published_runs
    finally:
        sys.path.pop(0)
    published_runs.main()
    assert capsys.readouterr().out == (ROOT / "scripts/results/published_runs.txt").read_text()
