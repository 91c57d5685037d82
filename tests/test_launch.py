"""Job files of `python -m moex.launch`: read back by bash and a YAML parser."""

import subprocess

import pytest
import yaml

from moex.launch.__main__ import main
from moex.launch.scripts import num_hosts
from moex.launch.settings import settings
from moex.plan.target import parse_target


@pytest.fixture(autouse=True)
def no_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEX_PLAN_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    "arguments, nodes, tasks, gpus",
    [
        (["qwen3_30b_16xh100"], 2, 1, 8),
        (["qwen3_30b_16xh100", "--per", "gpu"], 2, 8, 8),
        (["deepseek_v3_256xgb200"], 64, 1, 4),
        (["tiny", "--gpus", "h100:8", "--train.steps", "50", "--folder", "runs/a b"], 1, 1, 8),
    ],
)
def test_slurm(arguments, nodes, tasks, gpus, tmp_path, capsys):
    assert main(["slurm", *arguments, "--out", str(tmp_path / "job")]) == 0
    text = (tmp_path / "job").read_text()
    subprocess.run(["bash", "-n", str(tmp_path / "job")], check=True)
    lines = text.splitlines()
    assert f"#SBATCH --nodes={nodes}" in lines
    assert f"#SBATCH --ntasks-per-node={tasks}" in lines
    assert f"#SBATCH --gpus-per-node={gpus}" in lines
    assert "#SBATCH --signal=TERM@300" in lines and "#SBATCH --requeue" in lines
    assert 'scontrol requeue "$SLURM_JOB_ID"' in text and "-eq 75" in text
    assert "Not planned" in lines[1]
    for i, line in enumerate(lines):
        if line.startswith("export "):
            assert lines[i - 1].startswith("# "), "every setting has its reason"
    if "--folder" in arguments:
        assert "train.py tiny --train.steps 50 --folder 'runs/a b'" in text


def test_hosts_of_a_domain_stay_together():
    gb, h = parse_target("gb200:256"), parse_target("h100:256")
    assert (num_hosts(gb), num_hosts(h)) == (64, 32)
    assert "NCCL_MNNVL_ENABLE" in {s.name for s in settings(gb)}
    assert "NCCL_MNNVL_ENABLE" not in {s.name for s in settings(h)}


def test_jobset(tmp_path):
    out = tmp_path / "job.yaml"
    assert (
        main(["k8s", "qwen3_30b_16xh100", "--image", "here/moex:1", "--train.batch_size", "2048", "--out", str(out)])
        == 0
    )
    job = yaml.safe_load(out.read_text())
    assert job["kind"] == "JobSet" and job["metadata"]["name"] == "qwen3-30b-16xh100"
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == 2
    container = spec["template"]["spec"]["containers"][0]
    assert container["image"] == "here/moex:1" and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["args"][:3] == ["qwen3_30b_16xh100", "--train.batch_size", "2048"]
    assert container["args"][3:] == ["--folder", "/runs/qwen3-30b-16xh100"]
    values = {v["name"]: v.get("value") for v in container["env"]}
    assert values["NUM_PROCESSES"] == "2" and values["JAX_COMPILATION_CACHE_DIR"] == "/runs/.jax_cache"
    assert values["JOBSET_NAME"] is None, "from the pod's labels"


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["slurm", "tiny"], "--gpus is missing"),
        (["slurm", "tiny", "--gpus", "h100:12"], "hosts have 8 GPUs each"),
        (["k8s", "qwen3_30b_16xh100", "--parallel.ep", "48"], "doesn't divide"),
        (["slurm", "qwen3_30b_16xh100", "--hours", "0"], "--hours 0 must be at least 1"),
        (["slurm", "qwen3_30b_16xh100", "--name", "a\nreboot"], "a job's name has letters"),
        (["slurm", "qwen3_30b_16xh100", "--out", "/"], "Is a directory"),
        (["k8s", "qwen3_30b_16xh100", "--image", "a\nb: c"], "--image"),
        (["k8s", "qwen3_30b_16xh100", "--volume", "$(reboot)"], "--volume"),
    ],
)
def test_what_the_gpus_do_not_take_exits_with_2(arguments, told, capsys):
    assert main(arguments) == 2
    assert told in capsys.readouterr().err
