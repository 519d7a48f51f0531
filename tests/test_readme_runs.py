"""What the README shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.M | re.S)  # opening and closing in pairs
    return [text for marked, text in found if marked == language]


def test_the_staircase_is_real_output_of_plan() -> None:
    (shown,) = (block for block in blocks("") if block.startswith("$ python scripts/plan.py"))
    command, *expected = shown.splitlines()
    arguments = command.split()[2:]
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[: len(expected)] == expected


def test_the_python_blocks_run_one_after_another() -> None:
    namespace: dict[str, object] = {}
    for block in blocks("python"):
        exec(block, namespace)
    assert len(namespace["losses"]) == 4  # type: ignore[arg-type]
    stages = namespace["pipeline"].stages  # type: ignore[attr-defined]
    assert all(parameter.grad is not None for stage in stages.values() for parameter in stage.parameters())
    assert namespace["layer"].weight.grad is not None  # type: ignore[attr-defined]


def test_the_custom_model_is_at_most_fifteen_lines() -> None:
    model = blocks("python")[0]
    assert len([line for line in model.splitlines() if line.strip()]) <= 15


def test_the_tree_names_every_module_and_nothing_else() -> None:
    (tree,) = (block for block in blocks("") if block.startswith("zbpp/schedule/"))
    named = set(re.findall(r"\w+\.py", tree))
    modules = {path.name for path in (ROOT / "zbpp").rglob("*.py")} - {"__init__.py"}
    assert named == modules


def test_the_predicted_bubbles_are_the_simulators() -> None:
    from zbpp import plan, simulate

    for name, predicted in re.findall(r"^\| `(\w+)` \|[^|]*\| (\.\d+) \|", README, flags=re.M):
        assert f"{simulate(plan(name, 4, 12)).bubble_rate:.3f}".lstrip("0") == predicted


def test_the_functions_and_rules_shown_equal_plain_autograd() -> None:
    import torch

    from zbpp import backward_input

    namespace: dict[str, object] = {}
    for block in blocks("python"):
        exec(block, namespace)
    weight, matrix = (torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((4,), (3, 4)))
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    y = (matrix @ namespace["Scale"].apply(x, weight).sum(0)).square().sum()  # type: ignore[attr-defined]
    expected = torch.autograd.grad(y, (x, weight, matrix), retain_graph=True)
    (grad,), weight_grads = backward_input(y, None, [x])
    weight_grads.accumulate()
    for found, plain in zip((grad, weight.grad, matrix.grad), expected, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
