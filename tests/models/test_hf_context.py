"""Hugging Face models whose sequences are divided over processes, whole or in slices, against one process."""

from itertools import product

import pytest

pytest.importorskip("transformers")

import torch

from helpers.hf_float64 import library_in_float64
from helpers.processes import run_ranks
from helpers.split import assert_close
from zbpp import OverlapExchange, Pipeline, backward_input, make_mesh, plan
from zbpp.models.hf import HuggingFace
from zbpp.models.layers import token_loss
from zbpp.run.stages import recompute_stages

TIME, M = 12, 2
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen3": {},  # norms within each head
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8,
                    "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4,  # learned positions, products of its own
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip
BOUNDS = {  # of the slices of a sequence, by the name of a timetable
    "zb_h1": (),
    "zb_v": (),
    "zb_h1 in slices": (0, 6, 12),
    "zb_v in slices": (0, 2, 8, 12),
}
CASES = {  # by the number of processes: two have the stages of a V
    4: [("llama", "plain", "zb_h1"), ("llama", "padding", "zb_v in slices")],
    2: [
        *product(("qwen3", "gemma3_text", "gpt2"), ("plain",), ("zb_v in slices",)),
        ("mistral", "padding", "zb_v in slices"),
        ("llama", "documents", "zb_v"),  # slices need a mask for them
        ("llama", "blocks", "zb_v in slices"),
    ],
}
AT_NIGHT = [  # in four processes
    *product(FAMILIES, ("plain",), BOUNDS),
    *product(("llama", "mistral"), ("padding",), BOUNDS),
    *product(("llama", "mistral"), ("documents",), ("zb_h1", "zb_v")),
    *product(("llama",), ("blocks",), ("zb_h1 in slices", "zb_v in slices")),
]


class Hf64(HuggingFace):
    def build_stage(self, index, num_stages):
        return super().build_stage(index, num_stages).double()


class Recomputed(Hf64):
    def build_stage(self, index, num_stages):
        stage = super().build_stage(index, num_stages)
        recompute_stages({index: stage}, "block")
        return stage


def model_of(family, kind=Hf64, **settings):
    config = {"model_type": family, **(SIZES if family != "gpt2" else {}), **FAMILIES[family], **settings}
    return kind(config=config, vocab_size=40, sequence_length=16, head="whole")


def data(given):
    """(arguments of stage 0, target)."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 40, (4, TIME + 1), generator=generator)
    x, target = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    target[0, :7] = -100
    mask = torch.ones_like(x)
    mask[0, -4:] = 0
    positions = torch.cat([torch.arange(5), torch.arange(TIME - 5)]).expand(4, -1).contiguous()
    document = (positions[0] == 0).cumsum(0)
    allowed = (document[:, None] == document).tril().expand(4, 1, -1, -1)
    blocks = torch.zeros(allowed.shape).double().masked_fill(~allowed, torch.finfo(torch.float64).min)
    args = {
        "plain": (x,),
        "padding": (x, mask),
        "documents": (x, None, positions),
        "blocks": (x, blocks, positions),
    }
    return args[given], target


def planned(timetable, num_ranks):
    """Options of a Pipeline."""
    bounds = BOUNDS[timetable]
    name, num_slices = timetable.partition(" ")[0], max(1, len(bounds) - 1)
    return {"timetable": plan(name, num_ranks, M, num_slices=num_slices), "slice_bounds": bounds}


def divided(rank, cases, kind=Hf64, extras=()):
    """Per case the losses, the gradients, and how many gradients wait in each W, by stage."""
    found, num_ranks = {}, torch.distributed.get_world_size() // 2
    with library_in_float64():
        for family, given, timetable in cases:
            mesh, args, target = make_mesh(context=2), *data(given)
            options = {"mesh": mesh, "extras": [each() for each in extras]}
            with Pipeline(model_of(family, kind), **planned(timetable, num_ranks), **options) as pipeline:
                waiting = {stage: count_tasks(each) for stage, each in pipeline._rank.workers.items()}
                losses = [each.item() for each in pipeline.step(*args, target=target)]
                grads = {name: p.grad for name, p in pipeline.named_parameters()}
                found[family, given, timetable] = losses, grads, waiting
    return found


def count_tasks(worker):
    """A set, to which each W of a stage adds how many gradients have waited for it."""
    run_w, seen = worker.run_w, set()

    def count(microbatch, weight_grads):
        seen.add(len(weight_grads._tasks))
        run_w(microbatch, weight_grads)

    worker.run_w = count
    return seen


def alone(family, given):
    """The loss and {name: gradient} of the model in one process, by plain autograd."""
    whole, (args, target) = model_of(family).build_stage(0, 1), data(given)
    loss = token_loss(whole(*args), target)
    loss.backward()
    return loss.item(), {name: each.grad for name, each in whole.named_parameters(remove_duplicate=False)}


def num_waiting(family, num_stages):
    """How many gradients of each stage wait for W where sequences come whole, in one process."""
    model, found = model_of(family), []
    received = (data("plain")[0][0],)
    for index in range(num_stages):
        output = model.build_stage(index, num_stages)(*received)
        inputs = [each for each in received if each.requires_grad]
        _, weight_grads = backward_input([output], [torch.ones_like(output)], inputs)
        found.append(len(weight_grads._tasks))
        received = (output.detach().requires_grad_(),)
    return found


@pytest.fixture(scope="module")
def everyone():
    """{number of processes: what each of them has found}."""
    return {number: run_ranks(divided, number, cases) for number, cases in CASES.items()}


def assert_is_alone(found, family, given):
    with library_in_float64():
        loss, grads = alone(family, given)
    for losses, mine, _ in found:
        if losses:
            assert sum(losses) / M == pytest.approx(loss, rel=1e-12)
        assert_close(mine, {name: grads[name] for name in mine}, 1e-12)


@pytest.mark.parametrize(
    "number, family, given, timetable", [(number, *case) for number, cases in CASES.items() for case in cases]
)
def test_context_has_the_gradients_of_the_model_in_one_process(everyone, number, family, given, timetable):
    """Pipeline of 2 or 1 x context of 2, sequences whole and in slices."""
    assert_is_alone([each[family, given, timetable] for each in everyone[number]], family, given)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_context_has_the_gradients_of_a_family_under_all_timetables(family):
    cases = [case for case in AT_NIGHT if case[0] == family]
    everyone = run_ranks(divided, 4, cases)
    for case in cases:
        assert_is_alone([each[case] for each in everyone], *case[:2])


def test_every_linear_waits_for_w_as_without_context_and_slices(everyone):
    with library_in_float64():
        expected = {(family, num): num_waiting(family, num) for family in FAMILIES for num in (2, 4)}
    for number, cases in CASES.items():
        for (family, given, timetable), found in product(cases, everyone[number]):
            for stage, seen in found[family, given, timetable][2].items():
                num_stages = number // 2 * (2 if timetable.startswith("zb_v") else 1)
                assert seen == {expected[family, num_stages][stage]}, (family, given, timetable, stage)


def test_recompute_exchanges_in_slices_again_and_pending_ws_run_meanwhile():
    """The cache is asked once more for the keys of a slice, in B."""
    case = "gemma3_text", "plain", "zb_v in slices"
    everyone = run_ranks(divided, 2, [case], Recomputed, [OverlapExchange])
    assert_is_alone([each[case] for each in everyone], *case[:2])


REFUSED = {
    "context=2 does not divide num_key_value_heads=1": {"num_key_value_heads": 1},
    "attends by flex_attention": {"attn_implementation": "flex_attention"},
}


def refusals(rank):
    found = []
    for settings in REFUSED.values():
        try:
            Pipeline(model_of("llama", **settings), "zb_h1", num_microbatches=M, mesh=make_mesh(context=2))
        except ValueError as error:
            found.append(str(error))
    return found


def mutant(rank):
    """Why slices are refused, where a cache loses the values that it has exchanged."""
    from zbpp.models.hf.slices import SliceLayer

    update = SliceLayer.update

    def lossy(layer, key, value, *args):
        key, value = update(layer, key, value, *args)
        return key, value if layer.context is None else value * 0

    model = model_of("llama", rms_norm_eps=1e-3)  # no other test has tried it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SliceLayer, "update", lossy)
        with pytest.raises(ValueError) as refusal:
            Pipeline(model, **planned("zb_h1 in slices", 2), mesh=make_mesh(context=2))
    return str(refusal.value)


def test_the_trial_on_a_small_copy_refuses_what_divided_slices_get_wrong():
    """Slices alone and divided sequences alone are right."""
    for message in run_ranks(mutant, 4):
        assert (
            "llama can't be run in slices of divided sequences, since the output of a small copy" in message
        )


def test_attention_that_can_not_be_divided_is_refused_before_the_first_step():
    for found in run_ranks(refusals, 2):
        for text, message in zip(REFUSED, found, strict=True):
            assert text in message
