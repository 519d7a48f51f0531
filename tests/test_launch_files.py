"""Manifests of Kubernetes, images and docs/parallel.md: the fields that have to fit each other do."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from torch.distributed.run import parse_args

from zbpp import config as configs
from zbpp.job import cuda_settings
from zbpp.planning import plan

ROOT = Path(__file__).parent.parent
MANIFESTS = ROOT / "docker/kubernetes"
GPUS = 8

configs.register()


def pod_of(name):
    """(how many pods, the pod's template, the whole manifest)."""
    manifest = yaml.safe_load((MANIFESTS / name).read_text())
    spec = manifest["spec"]
    if manifest["kind"] == "PyTorchJob":
        worker = spec["pytorchReplicaSpecs"]["Worker"]
        return worker["replicas"], worker["template"]["spec"], manifest
    (jobs,) = spec["replicatedJobs"]
    job = jobs["template"]["spec"]
    return job["parallelism"], job["template"]["spec"], manifest


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "jobset.yaml"])
def test_a_manifest_starts_one_torchrun_per_node_with_a_config_that_composes(name):
    num_pods, pod, _ = pod_of(name)
    (container,) = pod["containers"]
    assert container["command"] == ["torchrun"]
    arguments = parse_args(container["args"])
    assert arguments.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"]) == str(GPUS)
    assert (arguments.training_script, arguments.module) == ("zbpp.train", True)
    given = {each["name"]: each["value"] for each in container["env"]}  # torch 2.11 has no argument for it
    assert int(given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert arguments.shutdown_timeout is None
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = configs.typed(compose("train", overrides=arguments.training_script_args))
    assert GPUS % config.parallel.tensor == 0  # a tensor group stays on a node
    num_ranks = num_pods * GPUS // config.parallel.tensor
    plan(config.schedule.name, num_ranks, config.num_microbatches)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert Path(config.run_dir).is_relative_to(mounts["runs"])
    assert mounts["shm"] == "/dev/shm"


def test_the_jobset_meets_at_its_first_pod():
    num_pods, pod, manifest = pod_of("jobset.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = manifest["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == num_pods
    assert job["template"]["spec"]["completionMode"] == "Indexed"
    (container,) = pod["containers"]
    arguments = parse_args(container["args"])
    assert arguments.nnodes == str(num_pods)
    name, port = manifest["metadata"]["name"], container["ports"][0]["containerPort"]
    assert arguments.rdzv_endpoint == f"{name}-{job['name']}-0-0.{name}:{port}"
    assert manifest["spec"]["network"]["enableDNSHostnames"] is True


# ---------------------------------------------------------------- images


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_what_an_image_copies_is_there(name):
    for text in re.findall(r"^COPY (.*)", (ROOT / "docker" / name).read_text(), flags=re.MULTILINE):
        for source in [part for part in text.split() if not part.startswith("--")][:-1]:
            assert (ROOT / source).exists(), source


NEEDS_ROOT = ("apt-get", "DEBIAN_FRONTEND=", "useradd", "install -d", "chown", "rm -rf /var/lib/apt")


def steps_of(name):
    """The COPYs and the shell commands of an image, in order, without those that need root."""
    text = (ROOT / "docker" / name).read_text().replace("\\\n", " ")
    for kind, rest in re.findall(r"^(COPY|RUN) (.*)", text, flags=re.MULTILINE):
        if kind == "COPY":
            yield kind, [part for part in rest.split() if not part.startswith("--")]
        else:
            kept = [part for part in re.split(r" +&& +", rest) if not part.startswith(NEEDS_ROOT)]
            yield kind, " && ".join(kept)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_the_steps_of_an_image_run_in_a_fresh_environment(name, tmp_path):
    """The base image has torch and Python: here a new environment with torch stands for it."""
    project, python = tmp_path / "zbpp", tmp_path / "venv/bin/python"
    project.mkdir()
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    for unwanted in ("PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(unwanted, None)

    def run(command):
        done = subprocess.run(
            ["bash", "-ec", command], cwd=project, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    run(f"python -m pip install -q -c {ROOT / 'constraints.txt'} torch")
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "*_cache", "__pycache__")
    for kind, step in steps_of(name):
        if kind == "RUN":
            run(
                step.replace('--extra-index-url "${TORCH_INDEX}"', "").replace("/tmp/", f"{tmp_path}/") or ":"
            )
            continue
        for source in step[:-1]:
            target = project if source == "." else project / source
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy(ROOT / source, target)
    run("zbpp train -n 2 steps=2 evaluate_every=0 run_dir=runs/a")


# ---------------------------------------------------------------- the page


def test_the_page_names_what_zbpp_sets_itself_and_files_that_exist():
    page = (ROOT / "docs/parallel.md").read_text()
    of_zbpp = {
        name
        for path in (ROOT / "zbpp").rglob("*.py")
        for name in re.findall(r'os\.environ\.setdefault\("([A-Z_]+)"', path.read_text())
    }
    assert of_zbpp  # a change of spelling would leave this test empty
    settings = {f"{name}={value}" for name, value in cuda_settings._ENVIRONMENT.items()}
    table = page.partition("`import zbpp` sets the first two")[2]
    assert {each for each in {f"{name}=" for name in of_zbpp} | settings if f"`{each}" not in table} == set()
    for target in re.findall(r"\]\(([^)#]+)\)", page):
        assert (ROOT / "docs" / target).exists(), target


def test_the_drawing_of_placement_is_torchs_numbering():
    from torch.distributed.device_mesh import init_device_mesh

    from zbpp.job.world import fake_world
    from zbpp.runtime.processes.mesh import DIMENSIONS

    page = (ROOT / "docs/parallel.md").read_text()
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 1, 1, 2), mesh_dim_names=DIMENSIONS).mesh
    tensor = ["-".join(map(str, group)) for group in mesh.reshape(-1, 2).tolist()]
    pipelines = ["-".join(map(str, group)) for group in mesh.reshape(2, -1).T.tolist()]
    assert f"tensor groups {', '.join(tensor)}: inside a node" in page
    assert f"pipelines {', '.join(pipelines)}: across nodes" in page
