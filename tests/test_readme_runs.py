"""What the README shows is what happens."""

import re
from pathlib import Path

import pytest

from helpers.pages import ROOT, blocks, run_command

README = "README.md"


def test_the_picture_is_what_its_command_draws(tmp_path: Path) -> None:
    """To the last pixel with the pinned matplotlib; other versions draw in the same size."""
    import matplotlib
    from matplotlib.image import imread

    (command,) = re.findall(r"`(zbpp plan [^`]*--picture \S+)`", (ROOT / README).read_text())
    run_command(command.replace("docs/", ""), tmp_path)
    drawn, shown = imread(tmp_path / "timeline.png"), imread(ROOT / "docs/timeline.png")
    assert drawn.shape == shown.shape
    if f"matplotlib=={matplotlib.__version__}\n" in (ROOT / "constraints.txt").read_text():
        assert (drawn == shown).all()


def test_the_predicted_bubbles_are_the_simulators() -> None:
    from zbpp import SCHEDULES, plan, simulate

    pattern = r"^\| `(\w+)` \|[^|]*\| (\.\d+) \|"
    here, there = (
        re.findall(pattern, (ROOT / page).read_text(), flags=re.M) for page in (README, "docs/planning.md")
    )
    assert {name for name, _ in here} < {name for name, _ in there} == set(SCHEDULES) - {"zb_auto"}
    rows = [*here, *there]
    for name, predicted in rows:
        assert f"{simulate(plan(name, 4, 12)).bubble_rate:.3f}".lstrip("0") == predicted


@pytest.mark.slow
def test_the_example_trains_on_two_ranks_as_in_one_process(tmp_path: Path) -> None:
    """The example's own loop under torchrun, and the same model without a pipeline, step by step."""
    import torch

    (tower,) = blocks(README, "python")
    (tmp_path / "tower.py").write_text(tower)
    launch = next(block for block in blocks(README, "bash") if block.startswith("torchrun"))
    printed = [line for line in run_command(launch, tmp_path).splitlines() if line.startswith("step")]
    losses = [float(line.split()[-1]) for line in printed]
    (shown,) = (block.splitlines() for block in blocks(README, "") if block.startswith("step 0"))
    assert [line for line in shown if line != "..."] == [*printed[:2], printed[-1]]

    namespace: dict[str, object] = {"__name__": "tower"}
    exec(tower, namespace)
    model = namespace["Tower"]()  # type: ignore[operator]
    whole = model.build_stage(0, 1)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    expected = []
    for step in range(20):
        torch.manual_seed(step)
        x = torch.randn(512, 512)
        loss = model.loss(whole(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_trainers_command_runs_on_the_examples_model(tmp_path: Path) -> None:
    (tmp_path / "tower.py").write_text(blocks(README, "python")[0])
    command = next(block for block in blocks(README, "bash") if block.startswith("zbpp train"))
    run_command(command, tmp_path)
    assert len((tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()) == 20


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_every_page_is_linked_and_every_link_leads_somewhere() -> None:
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    text = (ROOT / README).read_text()
    assert pages <= set(re.findall(r"\]\((docs/\w+\.md)\)", text))
    for page in (ROOT / README, *(ROOT / each for each in pages)):
        for link, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", page.read_text()):
            target = page.parent / link if link else page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in headings(target), f"{page}: {link}#{anchor}"


def test_the_readme_is_about_100_lines() -> None:
    assert len((ROOT / README).read_text().splitlines()) <= 120
