"""Scale on paper against torch's FLOP counter, `zbpp memory` and closed forms; and its command."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zbpp.cluster import Gpu, Hardware, Link, Mesh, ModelSizes, Question, Run, as_text, predicted_step, search
from zbpp.cluster.layer_work import attention_flops, head, layer, model_flops
from zbpp.cluster.model_sizes import sizes_of_node
from zbpp.cluster.search import candidates_of
from zbpp.cluster.stage_costs import costs_of, vocabulary_parallelism
from zbpp.commands.plan import main
from zbpp.config import config_folder, register, typed
from zbpp.config.typed_file import read_typed
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.planning import plan
from zbpp.ranges import ConfigError
from zbpp.schedule import Costs, simulate

FAST = 1e6  # GB/s, the most that a file may say
GPT = {
    "_target_": "zbpp.models.gpt.Gpt",
    "vocab_size": 256,
    "num_layers": 8,
    "hidden_size": 64,
    "num_heads": 4,
    "sequence_length": 32,
}
LLAMA = {**GPT, "_target_": "zbpp.models.llama.Llama", "num_kv_heads": 2, "intermediate_size": 192}


def hardware(nodes: int = 1, gpus: int = 1, **values: float) -> Hardware:
    gpu = {"peak_tflops": 100.0, "achieved": 0.5, "memory": 80.0, "memory_bandwidth": 1000.0}
    gpu |= {name: value for name, value in values.items() if name in gpu}
    link = Link(bandwidth=values.get("bandwidth", 100.0), latency=values.get("latency", 5.0))
    return Hardware(nodes=nodes, gpus_per_node=gpus, gpu=Gpu(**gpu), inside=link, between=link)


@pytest.mark.parametrize("node, kind", [(GPT, Gpt), (LLAMA, Llama)], ids=["gpt", "llama"])
def test_flops_and_parameters_are_those_that_torch_counts(node: dict, kind: type) -> None:
    """F, and B and W together, of a whole model on the meta device.

    Attention there is not fused: it computes the other half of the scores, and does not compute them again.
    """
    sizes, tokens = sizes_of_node(node), 2 * 32
    with torch.device("meta"):
        stage = kind(**{name: value for name, value in node.items() if name != "_target_"}).build_stage(0, 1)
        x = torch.zeros(2, 32, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        y = stage(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    parts = [layer(sizes, tokens, 1)] * sizes.num_layers + [head(sizes, tokens, 1)]
    half = sizes.num_layers * attention_flops(sizes, tokens)
    assert sum(part.f.products for part in parts) + half == forward.get_total_flops()
    both = sum(part.b.products + part.w.products for part in parts)
    assert both + 1.5 * half == backward.get_total_flops()
    assert sizes.parameters == sum(each.numel() for each in stage.parameters())


def test_tensor_parallel_ranks_share_the_flops_and_matrices() -> None:
    sizes = sizes_of_node(LLAMA)
    whole, part = layer(sizes, 64, 1), layer(sizes, 64, 2)
    for op in ("f", "b", "w"):
        assert 2 * getattr(part, op).products == getattr(whole, op).products
    assert 2 * part.largest == whole.largest


@pytest.mark.parametrize(
    "tensor, shard, switch", [(2, 1, ""), (1, 2, ""), (1, 1, "recompute"), (1, 1, "head_at_once")]
)
def test_the_memory_is_what_zbpp_memory_predicts(tensor: int, shard: int, switch: str) -> None:
    """A GPT on a node: static memory to 1 %, what F leaves to 2 %, what B leaves to 5 %, the peak to 10 %."""
    from hydra import compose, initialize_config_dir

    from zbpp.prediction.predictor import predict

    register()
    given = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "sequence_length": 128}
    overrides = [
        *("model=gpt_tiny", "data=stdlib", "schedule=zb_h1", "num_microbatches=4", "microbatch_size=2"),
        *("precision=mixed_bfloat16", f"parallel.num_processes={2 * tensor * shard}"),
        *(f"parallel.tensor={tensor}", f"parallel.shard={shard}"),
        {"": "seed=0", "recompute": "memory.recompute=block"}.get(switch, f"memory.{switch}=true"),
        *(f"model.{name}={value}" for name, value in given.items()),
    ]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = typed(compose("train", overrides))
    expected = predict(config)
    sizes = sizes_of_node({"_target_": "zbpp.models.gpt.Gpt", **given, "vocab_size": 256})
    mesh = Mesh(pipeline=2, shard=shard, tensor=tensor)
    run = Run(sizes, hardware(1, mesh.num_gpus), mesh, 2, **({switch: True} if switch else {}))
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


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v", "interleaved_1f1b"])
def test_links_that_cost_nothing_leave_the_simulated_span(schedule: str) -> None:
    num = 8
    run = Run(sizes_of_node(GPT), hardware(2, 2, bandwidth=FAST, latency=0), Mesh(pipeline=4), 2)
    timetable = plan(schedule, 4, num)
    numbers = costs_of(run, timetable.rank_of).costs.numbers
    expected = simulate(timetable, Costs(f=numbers["f"], b=numbers["b"], w=numbers["w"])).makespan
    step = predicted_step(run, schedule, num)
    assert step.time - step.losses["optimizer"] == pytest.approx(expected, rel=1e-4)


def test_slow_links_and_short_pipelines_are_named_as_the_limit() -> None:
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


def test_messages_between_nodes_take_the_link_between_nodes_and_others_that_inside() -> None:
    """A message of a rank over several GPUs goes from each of them; one that leaves its node is enough."""
    cluster = replace(hardware(12, 4), between=Link(bandwidth=1, latency=100))
    slow, fast = (0.1, 4.096e-3), (0.005, 4.096e-5)  # ms: latency, busy
    for tensor, shard in itertools.product((1, 2, 4), (1, 3, 2)):
        mesh = Mesh(pipeline=4, tensor=tensor, shard=shard)
        nodes = [[gpu // 4 for gpu in range(rank * mesh.block, (rank + 1) * mesh.block)] for rank in range(4)]
        costs = costs_of(Run(sizes_of_node(LLAMA), cluster, mesh, 1), [0, 1, 2, 3, 0, 1, 2, 3]).costs
        assert costs.comm == 0
        routes = costs.per_stage(8, rank_of=[0, 1, 2, 3, 0, 1, 2, 3]).routes
        for stage, receiver in enumerate([1, 2, 3, 0, 1, 2, 3]):  # x of F, op 0 of four
            route, sender = routes[4 * stage], stage % 4
            pairs = itertools.product(nodes[sender], nodes[receiver])
            expected = fast if all(one == other for one, other in pairs) else slow
            assert (route.receiver, route.latency, route.busy) == (receiver, *map(pytest.approx, expected))
            assert route.queue == (receiver if expected is fast else sender)  # a node's way out is one card


def test_a_link_between_nodes_carries_one_message_after_another() -> None:
    """Two stages a rank send twice as many messages over it, so a V loses where one stage a rank does not."""
    sizes = sizes_of_node(GPT)
    cluster = replace(hardware(2, 2), between=Link(bandwidth=0.01, latency=0))
    run = Run(sizes, cluster, Mesh(pipeline=4), 2)
    for schedule, messages in (("zb_h1", 1), ("zb_v", 2)):
        busy = 2 * 32 * 64 * 2 / (0.01 * 1e6)  # bytes of bfloat16 over bytes in a ms
        assert predicted_step(run, schedule, 32).time > 32 * messages * busy
    fast = replace(hardware(2, 2), between=Link(bandwidth=FAST, latency=2 * busy))
    assert predicted_step(Run(sizes, fast, Mesh(pipeline=4), 2), "zb_v", 32).time < 32 * messages * busy


def test_no_way_that_the_search_leaves_out_is_faster() -> None:
    question = Question(
        sizes=sizes_of_node({**LLAMA, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 4}),
        hardware=hardware(2, 4, latency=20.0),
        batch=64,
    )
    answer, every = search(question), []
    for each in candidates_of(question, recompute=False):
        try:
            every.append(predicted_step(each.run, each.schedule, each.num_microbatches).time)
        except ValueError:
            continue
    assert [step.time for step in answer.steps] == pytest.approx(sorted(every)[:5])
    assert answer.simulated < len(every)


def test_where_nothing_fits_the_answer_says_what_may_help() -> None:
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
    assert "nothing fits in 80 GiB a GPU, with recompute neither: take more GPUs" in as_text(answer)


# ---------------------------------------------------------------- the command


GOOD = (config_folder() / "cluster/a100.yaml").read_text()


@pytest.mark.parametrize("name", ["a100", "h100"])
def test_the_clusters_of_configs_are_read(name: str) -> None:
    cluster = read_typed(config_folder() / f"cluster/{name}.yaml", Hardware)
    assert cluster.gpus_per_node == 8
    assert cluster.source


def test_a_hugging_face_folder_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8}
    config |= {"intermediate_size": 1024, "vocab_size": 32000, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = (
        f"zb_h1 --cluster a100 --model {tmp_path} --sequence 512 --batch 64 --degrees pipeline=4,tensor=1"
    )
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    assert "64 sequences of 512 tokens" in printed
    assert all("4 x" in line and "zb_h1" in line for line in printed.split("\n\n")[1].splitlines()[1:])
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    assert main(command.split()) == 2
    assert "mixtral has layers that --cluster does not know" in capsys.readouterr().err


@pytest.mark.parametrize(
    "old, new, key",
    [
        ("nodes: 4\n", "", "nodes: no value is given, and it needs one"),
        ("nodes: 4", "nodes: 0", "nodes=0: write the number of nodes"),
        ("nodes: 4", "node: 4", "node"),
        ("memory: 74.5", "memory: 1e99", "memory=1e+99: write GiB, such as 80"),
        ("  peak_tflops: 312", "", "peak_tflops"),
        ("bandwidth: 300", "bandwidth: 0", "bandwidth=0.0: write GB/s in one direction"),
        (GOOD, "- 4", "has no keys"),
        (GOOD, "nodes: [", "can't be read"),
    ],
)
def test_an_absurd_value_is_refused_by_its_key(old: str, new: str, key: str, tmp_path: Path) -> None:
    """One line, which names the file and the key."""
    path = tmp_path / "cluster.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        read_typed(path, Hardware)
    assert str(error.value).startswith(str(path))
    assert key in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ("--model llama_1b", "needs --batch"),
        ("--model llama_1b --batch 64 --degrees pipeline=3", "write divisors of 32"),
        ("--model llama_1b --batch 3 --degrees shard=32", "no mesh of 32 GPUs can run it"),
        ("--model nowhere --batch 64", "there is no such file; write a path, or a name in configs"),
        ("zb_auto --model llama_1b --batch 64", "schedule zb_auto can't be searched; write some of gpipe"),
    ],
)
def test_what_can_not_be_asked_is_refused(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["--cluster", "a100", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("num_layers", "num_ranks", "ratio"),
    [(8, 4, "0.84"), (32, 16, "0.71")],  # 8 layers: 3 3 2 0+2.06 now, 2 + 2.06/4 shared
)
def test_what_vocabulary_parallelism_would_bring_is_said(num_layers: int, num_ranks: int, ratio: str) -> None:
    """The head of Llama 3 8B, in its layers."""
    node = {"num_layers": num_layers, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8}
    node |= {"intermediate_size": 14336, "sequence_length": 8192, "vocab_size": 128256}
    line = vocabulary_parallelism(sizes_of_node({"_target_": "zbpp.models.llama.Llama", **node}), num_ranks)
    assert f"{num_ranks} ranks shared the head" in line
    assert f"{ratio} of the time" in line
