"""Who may import whom, in zbpp/ and scripts/: read from the source, so that a lazy import counts too."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# schedule <- planning <- render; {schedule, autograd} <- runtime <- training;
# job, which all ranks of a job share, knows nobody; these <- {run, benchmark} <- scripts;
# data <- training: batches know no stage.
# seeding, devices, error_text, ranges, packing and partition know nobody; stage_api and tracebacks know
# error_text; streams knows devices.
_PLANS = {"schedule", "planning"}
_LEAVES = {"closeness", "stage_api", "seeding", "devices", "streams", "error_text", "tracebacks"}
_CORE = {"runtime", "schedule", "autograd", "job"} | _LEAVES
_RUNTIME = {"features", "observers", "measure"} | _CORE
_TRAINING = {"training", "data", "planning", "checkpoints"} | _RUNTIME
MAY_IMPORT = {
    "zbpp/__init__.py": {
        "job",
        "schedule",
        "planning",
        "autograd",
        "runtime",
        "features",
        "observers",
        "cutting",
        "partition",
        "checkpoints",
        "training",
        "parity_check",
    },
    "zbpp/stage_api.py": {"error_text"},
    "zbpp/seeding.py": set(),
    "zbpp/error_text.py": set(),
    "zbpp/closeness.py": set(),
    "zbpp/devices.py": set(),
    "zbpp/streams.py": {"devices"},
    "zbpp/tracebacks.py": {"error_text"},
    "zbpp/partition.py": set(),
    "zbpp/packing.py": set(),
    "zbpp/ranges.py": set(),
    "zbpp/signatures.py": {"error_text", "ranges"},
    "zbpp/config/": {"config", "error_text", "ranges", "signatures"},
    "zbpp/launch.py": {"ranges"} | _TRAINING,
    # From a config to a finished run: what each rank trains, and what the run leaves.
    "zbpp/run/": {"config", "models", "prediction", "render", "run"} | _TRAINING,
    "zbpp/job/": {"devices", "job"},
    # Any trainer beside plain autograd: it knows no schedule.
    "zbpp/parity_check/": {"parity_check"} | _RUNTIME,
    "zbpp/parity.py": {"parity_check"},
    "zbpp/data/": {"data", "packing", "seeding", "stage_api", "streams"},
    # What each rank will hold: the stages run on fake tensors.
    "zbpp/prediction/": {"config", "prediction", "render", "run"} | _TRAINING,
    "zbpp/benchmark/jobs.py": {"benchmark", "config", "run"} | _TRAINING,
    "zbpp/benchmark/": {"benchmark", "render", "torch_pipelining"} | _TRAINING,
    "zbpp/schedule/": {"schedule"},
    "zbpp/planning/": {"error_text", "partition", "tracebacks"} | _PLANS,
    # Scale on paper: hardware and a model's sizes become costs. Pure Python.
    "zbpp/cluster/": {"cluster", "partition", "ranges"} | _PLANS,
    # The one file of plan's that reads YAML.
    "zbpp/commands/plan/cluster.py": {"cluster", "commands", "config", "ranges"} | _PLANS,
    "zbpp/render/": {"render", "partition"} | _PLANS,
    "zbpp/commands/__init__.py": set(),
    "zbpp/commands/plan/": {"commands", "packing", "ranges", "render"} | _PLANS,
    "zbpp/autograd/": {"autograd", "devices", "seeding", "streams"},
    "zbpp/features/": {"features", "observers"} | _CORE,
    "zbpp/observers/": {"observers"} | _CORE,
    "zbpp/measure/": {"measure", "observers"} | _CORE,
    # The one file of the core that names what is beside it: the extras of every pipeline.
    "zbpp/runtime/__init__.py": {"features"} | _CORE,
    # Pipeline(stages, "zb_h1"): a schedule's name in place of a timetable. No other file of runtime plans.
    "zbpp/runtime/arguments.py": {"planning"} | _CORE,
    "zbpp/runtime/": _CORE,
    "zbpp/checkpoints/": {"checkpoints"} | _RUNTIME,
    # layers_per_stage="auto" is the choice of zbpp train.
    "zbpp/transformers/chosen_cut.py": {"config", "prediction", "run", "models", "transformers"} | _RUNTIME,
    # transformers' Trainer on a Pipeline. Nothing imports it but users.
    "zbpp/transformers/": {"models", "planning", "transformers"} | _RUNTIME,
    # torch's Schedule classes on a Pipeline, and what records torch's stages.
    "zbpp/torch_pipelining/": {"torch_pipelining", "planning"} | _RUNTIME,
    "zbpp/torchtitan.py": {"torch_pipelining"},
    "zbpp/training/": _TRAINING,
    "zbpp/cutting/": {"autograd", "closeness", "cutting", "devices", "error_text", "partition", "tracebacks"},
    # autograd: the loss of a language model, whose B is split from its W.
    "zbpp/models/": {"autograd", "models", "partition"} | _LEAVES,
    "zbpp/commands/compare.py": {"render", "schedule"},  # reads the folders of runs
    "zbpp/commands/hang.py": {"render", "schedule", "runtime"},
    # The command line: parses, calls one function, prints.
    "zbpp/commands/": {
        "commands",
        "run",
        "prediction",
        "benchmark",
        "config",
        "launch",
    }
    | _TRAINING,
    "zbpp/__main__.py": {"__version__", "commands"},
    "zbpp/train.py": {"commands"},  # torchrun -m zbpp.train
    "scripts/": {
        "cluster",
        "commands",
        "benchmark",
        "launch",
        "models",
        "parity_check",
        "render",
        "partition",
        "torch_pipelining",
        "transformers",
    }
    | _TRAINING,
}

_PURE = ("torch", "hydra", "omegaconf", "rich")

_PROGRAMS = (
    "zbpp.schedule.lower",
    "zbpp.schedule.program",
    "zbpp.schedule.passes",
    "zbpp.features.post_validation.gate",
)
_INTERPRETERS = ("zbpp.schedule.interpret.timing", "zbpp.schedule.interpret.memory")
# Instructions of features, and the passes that insert them.
_PASSES = (
    "activation_offload/copies",
    "activation_offload/choice",
    "gradient_release/updates",
    "head_at_once/head_w",
    "post_validation/gate",
    "reductions/instructions",
)
# (where, what it must not import, why); a folder stands for its files.
MUST_NOT_IMPORT = [
    ("zbpp/schedule/", _PURE, "plans are pure Python and numpy"),
    ("zbpp/planning/", _PURE, "plans are pure Python and numpy"),
    ("zbpp/render/", _PURE, "plans are pure Python and numpy"),
    ("zbpp/cluster/", _PURE, "plans are pure Python and numpy"),
    (
        "zbpp/schedule/families/",
        ("zbpp.schedule.lower", "zbpp.schedule.program", "zbpp.schedule.passes"),
        "families know no messages",
    ),
    ("zbpp/schedule/simulate.py", (*_PROGRAMS, *_INTERPRETERS), "it runs F, B, W, BW and messages alone"),
    ("zbpp/schedule/passes/", ("zbpp.schedule.interpret", "zbpp.schedule.costs"), "passes know no time"),
    ("zbpp/runtime/", ("zbpp.schedule.families",), "the runtime knows no schedule by name"),
    ("zbpp/autograd/", ("torch.distributed",), "the split is usable on its own"),
    ("zbpp/models/", ("torch.distributed",), "a model sees no rank and no group"),
    ("zbpp/data/", ("torch.distributed",), "every rank makes the same batches"),
    ("zbpp/commands/plan/", ("torch", "hydra", "omegaconf"), "it runs without torch"),
    *(
        (f"zbpp/features/{file}.py", _PURE, "instructions and passes are pure Python and numpy")
        for file in _PASSES
    ),
]
# A folder in zbpp/features is one feature, which knows no other; the file that names them all is no feature.
MAKES_EXTRAS = "zbpp/features/standard.py"
# The split is the files of its folder; folders in it hold extras, which __init__.py registers.
EXTRAS_OF_SPLIT = ("zbpp.autograd.models", "zbpp.autograd.offload", "zbpp.autograd.compiled")
# The heart: what a reader needs for the idea. Words of single features don't stand in it.
HEART = ("zbpp/schedule", "zbpp/runtime", "zbpp/autograd")
WORDS_OF_FEATURES = re.compile(
    r"\b(gates?|pass_?gate|post_?validation|name_of_step"  # post_validation
    r"|activation_?offload|round_?trips?|transport|with_copies"  # activation_offload
    r"|weight_?offload|offloaded_?weights"  # weight_offload
    r"|gradient_?release|with_updates|with_accumulation"  # gradient_release
    r"|head_?at_?once|(with_)?head_?w|take_large|replaced_w|accumulate_until"  # head_at_once, W
    r"|zero_?copies|reduce_?shared|with_reductions"  # reductions
    r"|sequence_?slices|sequence_?parts|cuda_?graphs?|fewer_?bytes|messages_?ahead)\b",
    re.IGNORECASE,
)
# A model may see the mesh that it is sharded over.
EXCEPT = {"zbpp/models/": ("torch.distributed.tensor", "torch.distributed.device_mesh")}
_SILENT = ("zbpp/schedule/", "zbpp/planning/", "zbpp/render/", "zbpp/cluster/")
# The check on one GPU has worlds that torchrun does not start: several ranks on gloo, and NCCL alone.
MAKES_JOBS = ("zbpp/job/world.py", "scripts/gpu_check/")
# What says "cuda" and means "a device" fails on every other accelerator. zbpp/devices.py asks
# torch.accelerator; the other files are for what CUDA alone has.
KINDS = {"cuda", "is_cuda", "hip", "xpu", "npu", "nccl", "xccl", "hccl"}
NAMES_A_KIND = (
    "zbpp/devices.py",
    "zbpp/config/commands.py",  # the names that a config may write
    "zbpp/job/cuda_settings.py",  # of the driver and of the allocator
    "zbpp/features/graphs/",  # CUDA graphs
    "zbpp/models/attention.py",  # kernels, by what the GPU can do
    "zbpp/autograd/adding.py",
    "zbpp/autograd/models/grouped_linear.py",
    "zbpp/autograd/models/loss_kernels.py",
    "zbpp/run/optimizer.py",  # Triton
)
CONFIGURED = ("hydra", "omegaconf")  # in zbpp/config/ only: commands get plain objects


def violations(root: Path) -> list[str]:
    """Each breach as `file:line: what is wrong`."""
    found = []
    for folder in ("zbpp", "scripts"):
        for path in sorted((root / folder).rglob("*.py")):
            name, tree = path.relative_to(root).as_posix(), ast.parse(path.read_text())
            checks = (_rooms, _forbidden, _families, _features, _split, _calls, _kinds)
            found += [f"{name}:{line}: {what}" for check in checks for line, what in check(name, tree)]
    return found


Finding = tuple[int, str]


def _imports(name: str, tree: ast.AST) -> Iterator[Finding]:
    """(line, dotted name) of everything imported, `from a import b` as a.b, relative ones resolved."""
    package = name.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def _within(dotted: str, modules: tuple[str, ...]) -> bool:
    return any(f"{dotted}.".startswith(f"{module}.") for module in modules)


def _rooms(name: str, tree: ast.AST) -> Iterator[Finding]:
    allowed = next((rooms for place, rooms in MAY_IMPORT.items() if name.startswith(place)), None)
    if allowed is None:
        yield 1, "has no place in the floor plan: add its row to MAY_IMPORT"
        return
    for line, dotted in _imports(name, tree):
        package, room, *_ = [*dotted.split("."), ""]
        if package == "zbpp" and room not in allowed:
            yield line, f"imports {dotted}; may import {', '.join(sorted(allowed)) or 'nothing of zbpp'}"


def _forbidden(name: str, tree: ast.AST) -> Iterator[Finding]:
    for line, dotted in _imports(name, tree):
        for place, modules, reason in MUST_NOT_IMPORT:
            allowed = _within(dotted, EXCEPT.get(place, ()))
            if name.startswith(place) and _within(dotted, modules) and not allowed:
                yield line, f"imports {dotted}: {reason}"
        if _within(dotted, CONFIGURED) and not name.startswith("zbpp/config/"):
            yield line, f"imports {dotted}: Hydra and OmegaConf belong to zbpp/config/"


def _families(name: str, tree: ast.AST) -> Iterator[Finding]:
    """Families don't know each other; the data-flow table knows actions only."""
    is_family = name.startswith("zbpp/schedule/families/") and not name.endswith("__init__.py")
    is_dataflow = name == "zbpp/schedule/dataflow.py"
    for line, dotted in _imports(name, tree):
        if is_family and _within(dotted, ("zbpp.schedule.families",)):
            yield line, f"imports {dotted}: families don't know each other"
        if is_dataflow and _within(dotted, ("zbpp",)) and not _within(dotted, ("zbpp.schedule.timetable",)):
            yield line, f"imports {dotted}: dataflow knows no placement, order or cost"


def _features(name: str, tree: ast.AST) -> Iterator[Finding]:
    """A feature knows no other feature; files beside the features' folders are for several of them."""
    folder, _, file = name.removeprefix("zbpp/features/").partition("/")
    if not name.startswith("zbpp/features/") or name == MAKES_EXTRAS:
        return
    beside = {path.stem for path in (ROOT / "zbpp/features").glob("*.py")} - {"standard"}
    for line, dotted in _imports(name, tree):
        if not _within(dotted, ("zbpp.features",)):
            continue
        room = dotted.split(".")[2]
        if room != folder and not (file and room in beside):
            yield line, f"imports {dotted}: a feature knows no other"


def _split(name: str, tree: ast.AST) -> Iterator[Finding]:
    folder, _, file = name.rpartition("/")
    if folder == "zbpp/autograd" and file != "__init__.py":
        for line, dotted in _imports(name, tree):
            if _within(dotted, EXTRAS_OF_SPLIT):
                yield line, f"imports {dotted}: the split knows no extra"


def _calls(name: str, tree: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if called == "print" and name.startswith(_SILENT):
            yield node.lineno, "prints: plans are returned as text, scripts print it"
        if called == "init_process_group" and not name.startswith(MAKES_JOBS):
            yield node.lineno, "calls init_process_group: job/world.py alone does"


def _kinds(name: str, tree: ast.AST) -> Iterator[Finding]:
    if name.startswith(("scripts/", *NAMES_A_KIND)):
        return
    foreign = [(line, dotted) for line, dotted in _imports(name, tree) if not _within(dotted, ("zbpp",))]
    words = [(line, word) for line, dotted in foreign for word in dotted.split(".")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            words.append((node.lineno, node.attr))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.append((node.lineno, node.value.split(":")[0]))
    for line, word in words:
        if word in KINDS:
            yield line, f"says {word}: ask zbpp/devices.py, which knows every accelerator"


def test_every_room_keeps_to_the_floor_plan():
    assert violations(ROOT) == []


_WITHOUT_A_MAP = ("zbpp", "zbpp/commands")  # their first pages name commands, and names to import


def test_the_map_of_a_room_has_all_of_its_files():
    """The first page of a room of three files or more, the docstring of its __init__.py, names each."""
    missing = []
    for first_page in sorted((ROOT / "zbpp").rglob("__init__.py")):
        room = first_page.parent
        files = {each.stem for each in room.glob("*.py")} - {"__init__"}
        words = re.findall(r"\w+", ast.get_docstring(ast.parse(first_page.read_text())) or "")
        name = room.relative_to(ROOT).as_posix()
        if len(files) > 2 and name not in _WITHOUT_A_MAP:
            missing += [f"{name}: {file}" for file in sorted(files - {*words})]
    assert missing == []


def words_of_features(root: Path) -> list[str]:
    """Each line of the heart's files with a word that belongs to one feature, without examples for users."""
    return [
        f"{path.relative_to(root).as_posix()}:{number}: {found.group()}"
        for folder in HEART
        for path in sorted((root / folder).glob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := WORDS_OF_FEATURES.search(line)) is not None
    ]


def test_the_heart_has_no_word_of_a_feature():
    assert words_of_features(ROOT) == []


@pytest.mark.parametrize(
    "line", ["gate = 1", "# the gate of a step", "class CudaGraphs:", "x.head_at_once()", "HeadW(0, 1)"]
)
def test_a_planted_word_of_a_feature_is_found(tmp_path, line):
    path = tmp_path / "zbpp/runtime/rank.py"
    path.parent.mkdir(parents=True)
    path.write_text(f'"""A file."""\n\n{line}\n')
    assert len(words_of_features(tmp_path)) == 1


@pytest.mark.parametrize(
    "name, line, complaint",
    [
        ("zbpp/planning/search/improve.py", "def f():\n    import torch", "plans are pure Python"),
        ("zbpp/planning/plan.py", "def f():\n    print(1)", "prints"),
        ("zbpp/schedule/lower.py", "from zbpp.planning import plan", "may import schedule"),
        ("zbpp/schedule/families/a.py", "from .b import c", "families don't know each other"),
        ("zbpp/schedule/families/a.py", "from ..lower import Send", "families know no messages"),
        ("zbpp/schedule/simulate.py", "from .program import Send", "F, B, W, BW and messages alone"),
        ("zbpp/schedule/passes/posts.py", "from ..interpret.timing import Stream", "passes know no time"),
        ("zbpp/schedule/dataflow.py", "from zbpp.schedule.costs import Costs", "dataflow knows no placement"),
        ("zbpp/runtime/pipeline.py", "from zbpp.schedule.families import zb_v", "knows no schedule by name"),
        ("zbpp/features/head_at_once/head_w.py", "from torch import nn", "passes are pure Python"),
        ("zbpp/autograd/split.py", "from torch import distributed", "the split is usable on its own"),
        ("zbpp/autograd/split.py", "from zbpp import Timetable", "may import autograd"),
        ("zbpp/autograd/graph.py", "from .models.sharded import is_on_mesh", "the split knows no extra"),
        ("zbpp/models/gpt.py", "import torch.distributed as dist", "a model sees no rank"),
        ("zbpp/runtime/rank.py", "from zbpp.features.graphs import CudaGraphs", "imports zbpp.features"),
        ("zbpp/runtime/pipeline.py", "import zbpp.features.reductions.reductions", "imports zbpp.features"),
        ("zbpp/runtime/stage.py", "from zbpp.observers.replicas import A", "imports zbpp.observers"),
        ("zbpp/features/context/a.py", "import zbpp.features.graphs.cuda", "a feature knows no other"),
        ("zbpp/runtime/links.py", "dist.init_process_group()", "job/world.py alone"),
        ("zbpp/training/trainer.py", "from omegaconf import OmegaConf", "belong to zbpp/config/"),
        ("zbpp/launch.py", "import torch\n\ntorch.cuda.synchronize()", "says cuda: ask zbpp/devices.py"),
        (
            "zbpp/runtime/processes/mesh.py",
            'is_gpu = device.type == "cuda"',
            "says cuda: ask zbpp/devices.py",
        ),
        ("zbpp/utils.py", "", "has no place in the floor plan"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, name, line, complaint):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(f'"""A file."""\n\n{line}\n')
    found = violations(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(f"{name}:")
    assert complaint in found[0]


@pytest.mark.parametrize(
    "code",
    [
        "import zbpp",
        "from zbpp import plan, simulate, lower, Costs",
        "import zbpp.planning, zbpp.render, zbpp.schedule.families",
        "import zbpp.commands.plan",
    ],
)
def test_planning_imports_no_torch(code):
    check = f"import sys; {code}; print({{'torch', 'hydra', 'omegaconf', 'matplotlib'}} & sys.modules.keys())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("set()\n", "")
