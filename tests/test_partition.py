"""Which layers go to which stage: against every cut there is, and against torch's own count of products."""

import random
from itertools import accumulate, combinations_with_replacement, pairwise

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.partition import partition

GPT = {"num_layers": 6, "hidden_size": 16, "num_heads": 2, "sequence_length": 8}
CLOSE = 1 + 1e-9


def v(num_stages):
    there = list(range(num_stages // 2))
    return there + there[::-1]


def every_cut(num_layers, num_stages, last):
    """All of them; only a stage with something else to do may go without layers."""
    for bounds in combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        counts = [stop - start for start, stop in pairwise([0, *bounds, num_layers])]
        least = [1] * num_stages
        least[-1] -= last > 0 and num_stages > 1
        if all(count >= most for count, most in zip(counts, least, strict=True)):
            yield counts


def cases(alike, sizes=(1, 2, 3, 4, 6)):
    """(layers, num_stages, last), drawn."""
    rng = random.Random(0)
    for _ in range(60):
        num_stages = rng.choice(sizes)
        size = rng.randint(num_stages, 9)
        layers = [1.0] * size if alike else [rng.uniform(0.5, 2) for _ in range(size)]
        yield layers, num_stages, rng.choice([0, 0.3, rng.uniform(0.5, 5)])


def loads(counts, layers, *, last=0.0):
    """The cost of each stage."""
    costs = [sum(layers[start:stop]) for start, stop in pairwise(accumulate(counts, initial=0))]
    costs[-1] += last
    return costs


def heaviest_rank(stages, rank_of):
    return max(
        sum(load for load, owner in zip(stages, rank_of, strict=True) if owner == rank) for rank in rank_of
    )


@pytest.mark.parametrize("alike", [True, False])
def test_no_cut_has_a_lighter_heaviest_stage(alike):
    for layers, num_stages, last in cases(alike):
        stages = {
            tuple(cut): max(loads(cut, layers, last=last)) for cut in every_cut(len(layers), num_stages, last)
        }
        found = partition(layers, num_stages, last=last)
        assert stages[tuple(found)] <= min(stages.values()) * CLOSE


def test_the_lightest_cuts_best_for_a_v_is_taken():
    for layers, num_stages, last in cases(alike=True, sizes=(2, 4, 6)):
        every = [loads(cut, layers, last=last) for cut in every_cut(len(layers), num_stages, last)]
        lightest = min(map(max, every)) * CLOSE
        best = min(heaviest_rank(stages, v(num_stages)) for stages in every if max(stages) <= lightest)
        found = loads(partition(layers, num_stages, last=last), layers, last=last)
        assert heaviest_rank(found, v(num_stages)) <= best * CLOSE


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "head", "expected"),
    [
        (7, 3, 0, [3, 2, 2]),  # equal layers: what is left over goes to earlier stages
        (6, 4, 0, [2, 2, 1, 1]),
        (16, 4, 3.8, [5, 5, 5, 1]),  # Llama 3.2 1B: its head is as heavy as 3.8 layers
        (16, 8, 3.8, [1, 2, 2, 2, 3, 3, 3, 0]),  # the head alone; stage 0 shares its rank in a V
    ],
)
def test_small_cuts_are_those_found_by_hand(num_layers, num_stages, head, expected):
    assert partition([1.0] * num_layers, num_stages, last=head) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 1], 3), "2 layers are too few for 3 stages: 3 is the least"),
        (([1, -1], 2), "a layer costs -1: write a finite number, 0 or more"),
        (([1, float("nan")], 1), "a layer costs nan"),
        (([1], 0), "num_stages=0: write a whole number, 1 or more"),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        partition(*arguments)


# ---------------------------------------------------------------- the models


def product_flops(module, x):
    """torch's count for one sequence, [1, time, ...] in; attention in full, though half of it is masked."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module(x)
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for name, flops in counts.items() if "bmm" in name)
    return sum(counts.values()) - attention / 2


@pytest.mark.parametrize(
    "model",
    [
        Gpt(**GPT, vocab_size=300),
        Llama(**{**GPT, "num_heads": 4}, num_kv_heads=2, intermediate_size=40, vocab_size=300),
    ],
    ids=["gpt", "llama"],
)
def test_the_head_counts_as_many_layers_as_torch_counts(model):
    stage = model.build_stage(0, 1)
    x = torch.zeros(1, GPT["sequence_length"], GPT["hidden_size"])
    ratio = product_flops(stage.head, x) / product_flops(stage.layer_0, x)
    assert model.last_cost == pytest.approx(ratio, rel=1e-12)


def test_a_heavy_head_gets_a_stage_of_its_own_and_changes_nothing():
    model = Gpt(**GPT, vocab_size=440)
    assert model.layer_counts(4) == [2, 2, 2, 0]
    stages = [model.build_stage(index, 4) for index in range(4)]
    assert [name for name, _ in stages[3].named_children()] == ["norm", "head"]
    x = tokens = torch.arange(8)[None]
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, model.build_stage(0, 1)(tokens))
