"""The page "On a cluster": its lines start the same script on two nodes, and its files say what these lines say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import processes
import pytest

yaml = pytest.importorskip("yaml")
PAGE = (processes.ROOT / "docs" / "how_to" / "clusters.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    """Return the page's block of a kind."""
    return re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL).group(1)


MANIFEST = yaml.safe_load(block("yaml"))


@pytest.mark.thorough
@pytest.mark.dist
def test_torchruns_lines_and_kubernetes_variables_start_one_job(tmp_path):
    """The first node runs the page's line; the second has what Kubeflow Trainer gives the manifest's command."""
    line, trainer, port = block("console").splitlines()[0], MANIFEST["spec"]["trainer"], str(processes.free_port())
    first = shlex.split(line.partition("$")[2].replace("10.0.0.1", "127.0.0.1").replace("29500", port))
    given = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"], "NODE_RANK": 1}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    script = str(processes.ROOT / "docs" / "train.py")
    agents = []
    for command, env in ((first, {}), (trainer["command"], {f"PET_{name}": str(each) for name, each in given.items()})):
        assert command[0] == "torchrun"
        assert command[-1] == "train.py"
        whole = [sys.executable, "-m", "torch.distributed.run", *command[1:-1], script]
        agents.append(subprocess.Popen(whole, cwd=tmp_path, env=processes.environment(**env), stdout=subprocess.PIPE))
    try:
        said = [agent.communicate(timeout=120)[0].decode() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0]
    assert "match plain training" in said[0]
    assert (tmp_path / "model.pt").exists()


def test_slurms_script_runs_torchruns_line_on_both_nodes(tmp_path):
    for name, says in (("scontrol", "printf 'node1\\nnode2\\n'"), ("srun", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", block("bash")], env=os.environ | own, capture_output=True, text=True, check=True
    )
    options = dict(zip(*[iter(shlex.split(done.stdout)[1:-1])] * 2, strict=True))
    assert options == {
        "--nnodes": "2",
        "--nproc-per-node": "2",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "node1:29500",
        "--rdzv-id": "7",
    }


def test_rays_script_runs_the_same_file_on_as_many_processes():
    code = block("python")
    compile(code, "ray_train.py", "exec")
    trainer = MANIFEST["spec"]["trainer"]
    assert f"num_workers={trainer['numNodes'] * trainer['numProcPerNode']}" in code
    assert Path(re.search(r'run_path\("(.+?)"\)', code).group(1)).name == trainer["command"][-1]
