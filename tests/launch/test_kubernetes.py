"""Manifests: what they say fits Kubernetes' own schemas, and what they start trains the same model."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.hosts import Command, Hosts, hosts, needs_hosts
from tests.launch.launching import Result, command, evenstep, eventually, training, write_script

Found = dict[str, Any]
SCHEMAS = "1.31"
COMMON = ("run", "--kubernetes", "--image", "example.org/train:1", "--name", "digits", "--dry-run")


def printed(folder: Path, *words: object, kind: str = "job") -> dict[str, Found]:
    """What --dry-run prints, by kind."""
    result = evenstep(folder, *COMMON, "--kind", kind, *words)
    assert result.code == 0, result
    return {one["kind"]: one for one in yaml.safe_load_all(result.out)}


def check(manifest: Found) -> None:
    kubernetes_validate.validate(manifest, SCHEMAS, strict=True)


def check_pod(spec: Found) -> None:
    check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec})


def pod_of(made: dict[str, Found], kind: str) -> Found:
    """The pod's specification in each of the three forms."""
    if kind == "trainjob":
        (replicated,) = made["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        job: Found = replicated["template"]
    elif kind == "pytorchjob":
        job = {"spec": made["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Master"]}
    else:
        job = made["Job"]
    spec: Found = job["spec"]["template"]["spec"]
    return spec


def test_a_job_and_what_it_needs(tmp_path: Path) -> None:
    write_script(tmp_path, "print('a')\n\n# 中文 $(HOME)\n", "train.py")
    words = [
        "--nodes",
        2,
        "--processes",
        4,
        "--gpus",
        4,
        "--namespace",
        "lab",
        "--claim",
        "runs",
        "--volume",
        "d:/data",
    ]
    made = printed(tmp_path, *words, "--seed", 3, "--no-exact", "--mount-script", "train.py", "a b", "$(HOME)", "$x")
    assert set(made) == {"Secret", "ConfigMap", "NetworkPolicy", "Service", "Job"}
    for one in made.values():
        check(one)
        assert one["metadata"]["namespace"] == "lab"
        assert one["metadata"]["name"] == "digits"
    spec = made["Job"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert container["command"] == [
        "evenstep", "run", "--nodes", "2", "--node-rank", "$(JOB_COMPLETION_INDEX)", "--master-addr",
        "digits-0.digits", "--master-port", "29500", "--processes", "4", "--run", "/runs/digits", "--seed", "3",
        "--no-exact", "/evenstep/train.py", "a b", "$$(HOME)", "$$x",
    ]  # fmt: skip
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    token = made["Secret"]["stringData"]["token"]
    assert len(token) > 20
    assert token not in json.dumps(made["Job"])
    assert made["ConfigMap"]["data"] == {"train.py": (tmp_path / "train.py").read_text()}
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes[mounts["/runs"]]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert volumes[mounts["/data"]]["persistentVolumeClaim"] == {"claimName": "d"}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert volumes[mounts["/evenstep"]]["configMap"] == {"name": "digits"}
    # Only the job's own pods come in, and the name that they call is theirs.
    policy = made["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    assert made["Service"]["spec"]["selector"] == labels
    assert (made["Service"]["metadata"]["name"], pod["subdomain"]) == ("digits", "digits")
    # An eviction does not count, what would come again ends the job, the rest is tried again from the checkpoint.
    rules = spec["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob", "Ignore"]
    assert rules[1]["onExitCodes"]["values"] == [1, 2]
    assert (pod["restartPolicy"], spec["backoffLimit"], pod["terminationGracePeriodSeconds"]) == ("Never", 12, 120)


def test_without_a_claim_checkpoints_are_said_to_be_lost_and_nothing_starts_again(tmp_path: Path) -> None:
    result = evenstep(tmp_path, *COMMON, "--secret", "mine", "in_the_image.py")
    assert "lost with the pods" in result.err
    made = {one["kind"]: one for one in yaml.safe_load_all(result.out)}
    assert set(made) == {"NetworkPolicy", "Job"}  # one pod has no other to find
    check(made["Job"])
    assert made["Job"]["spec"]["backoffLimit"] == 0
    (container,) = pod_of(made, "job")["containers"]
    (token,) = container["env"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "token"}
    assert container["command"] == [
        "evenstep", "run", "--processes", "1", "--run", "/runs/digits", "in_the_image.py",
    ]  # fmt: skip


def test_a_train_job(tmp_path: Path) -> None:
    """As in the API of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1) and of JobSet (v1alpha2)."""
    made = printed(tmp_path, "--nodes", 3, "--processes", 2, "--claim", "runs", "train.py", kind="trainjob")
    assert set(made) == {"Secret", "NetworkPolicy", "TrainingRuntime", "TrainJob"}
    job, runtime = made["TrainJob"], made["TrainingRuntime"]
    assert job["apiVersion"] == runtime["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["spec"] == {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "digits"},
        "trainer": {"numNodes": 3, "numProcPerNode": 2},
    }
    assert set(runtime["spec"]) == {"mlPolicy", "template"}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3, "torch": {}}
    jobs = runtime["spec"]["template"]["spec"]
    assert set(jobs) == {"failurePolicy", "replicatedJobs"}
    (rule,) = jobs["failurePolicy"]["rules"]
    assert jobs["failurePolicy"]["maxRestarts"] == 6
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (replicated,) = jobs["replicatedJobs"]
    assert set(replicated) == {"name", "template"}
    # The operator finds what to give PET_NODE_RANK and the others by this label and these names.
    assert replicated["name"] == "node"
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": replicated["template"]["spec"]})
    (container,) = pod_of(made, "trainjob")["containers"]
    assert container["name"] == "node"
    assert container["command"] == ["evenstep", "run", "--processes", "2", "--run", "/runs/digits", "train.py"]
    assert not {env["name"] for env in container["env"]} & {"PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"}


def test_a_pytorch_job(tmp_path: Path) -> None:
    """As in the API of Kubeflow's Training Operator (kubeflow.org/v1)."""
    made = printed(tmp_path, "--nodes", 3, "--processes", 2, "--claim", "runs", "train.py", kind="pytorchjob")
    assert set(made) == {"Secret", "NetworkPolicy", "PyTorchJob"}
    job = made["PyTorchJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    assert set(job["spec"]) == {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"}
    assert job["spec"]["nprocPerNode"] == "2"  # a string there
    assert job["spec"]["runPolicy"] == {"cleanPodPolicy": "None", "backoffLimit": 18}
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: one["replicas"] for kind, one in replicas.items()} == {"Master": 1, "Worker": 2}
    for one in replicas.values():
        assert set(one) == {"replicas", "restartPolicy", "template"}
        assert one["restartPolicy"] == "OnFailure"
        check_pod(one["template"]["spec"])
        (container,) = one["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator's name for it
    assert set(printed(tmp_path, "train.py", kind="pytorchjob")["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]) == {
        "Master"
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kubernetes", "a.py"], "--kubernetes needs --image"),
        (["--image", "i", "a.py"], "--image is for --kubernetes"),
        (["--kubernetes", "--image", "i", "--hosts", "a,b", "a.py"], "--hosts goes without --kubernetes"),
        (["--kubernetes", "--image", "i", "--name", "A_b", "a.py"], "'A_b' is no name for Kubernetes"),
        (["--kubernetes", "--image", "i", "--name", "a" * 41, "a.py"], "at most 40"),
        (["--kubernetes", "--image", "i", "--volume", "data", "a.py"], "--volume 'data' is no claim"),
        (["--kubernetes", "--image", "i", "--mount-script", "a.py"], "there is no script a.py"),
        (["--kubernetes", "--image", "i", "--mount-script", "-m", "a"], "takes a script, not a module"),
        (["--kubernetes", "--image", "i", "--mount-script", "large.py"], "900000 bytes"),
        (["--kubernetes", "--image", "i", "a.py"], "there is no kubectl"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "large.py").write_text("#" * 900_001)
    result = evenstep(tmp_path, "run", *words, env={"PATH": str(tmp_path)})
    assert result.code == 2, result
    assert said in result.err
    assert "what to do: " in result.err


# ---- kubectl: an executable that notes what it was told, and answers like a cluster.

KUBECTL = """
    import json, os, sys, pathlib
    here = pathlib.Path(os.environ["CLUSTER"])
    words = sys.argv[1:]
    with open(here / "calls", "a") as file:
        file.write(json.dumps(words) + "\\n")
    looked = (here / "calls").read_text().count('"job",')
    code = int((here / "code").read_text())
    if words[0] == "create":
        (here / "given.yaml").write_text(sys.stdin.read())
        print("secret/digits")
        if code == 99:
            sys.exit('Error from server (Forbidden): jobs.batch is forbidden')
    elif words[:2] == ["get", "pods"]:
        status = {"phase": "Failed" if code else "Succeeded"} if looked > 1 else {"phase": "Pending"}
        pods = [{"metadata": {"name": "digits-0-abcde"}, "status": status}]
        print(json.dumps({"items": pods}))
    elif words[:2] == ["get", "pod"]:
        state = {"terminated": {"exitCode": code}}
        print(json.dumps({"status": {"phase": "Failed", "containerStatuses": [{"state": state}]}}))
    elif words[:2] == ["get", "job"]:
        failed = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "exit code 1"}
        ended = failed if code else {"type": "Complete", "status": "True"}
        print(json.dumps({"status": {"conditions": [ended] if looked > 2 else []}}))
    elif words[0] == "logs":
        print("what node 0 printed")
"""


def submitted(folder: Path, code: int) -> tuple[Result, list[list[str]]]:
    """The result, and what kubectl was told, when node 0 ends with `code`."""
    (folder / "cluster").mkdir(parents=True)
    (folder / "cluster" / "code").write_text(str(code))
    kubectl = write_script(folder, KUBECTL, "kubectl.py")
    program = folder / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(kubectl))} "$@"\n')
    program.chmod(0o755)
    env = {"PATH": f"{program.parent}:{os.environ['PATH']}", "CLUSTER": str(folder / "cluster")}
    words = [word for word in COMMON if word != "--dry-run"]
    result = evenstep(folder, *words, "--namespace", "lab", "train.py", env=env)
    calls = [json.loads(line) for line in (folder / "cluster" / "calls").read_text().splitlines()]
    return result, calls


def test_it_is_created_and_followed_to_its_end(tmp_path: Path) -> None:
    result, calls = submitted(tmp_path / "good", 0)
    assert (result.code, result.out) == (0, "what node 0 printed\n"), result
    made = {one["kind"]: one for one in yaml.safe_load_all((tmp_path / "good/cluster/given.yaml").read_text())}
    token = made["Secret"]["stringData"]["token"]
    assert all("--namespace=lab" in call and token not in str(call) for call in calls)
    assert token not in result.err
    assert "job/digits is done; its run directory: /runs/digits" in result.err
    assert (
        "kubectl delete job,service,secret,networkpolicy,configmap -l app.kubernetes.io/instance=digits" in result.err
    )
    failed, _ = submitted(tmp_path / "failed", 1)
    assert failed.code == 1
    assert "job/digits failed: PodFailurePolicy: exit code 1" in failed.err
    refused, calls = submitted(tmp_path / "refused", 99)
    assert refused.code == 4
    assert "jobs.batch is forbidden" in refused.err
    assert calls[-1][:3] == ["delete", "--ignore-not-found", "secret/digits"]  # and nothing that was there before


# ---- the kubelet, on network namespaces


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    needs_hosts()
    with hosts(2) as made:
        yield made


def kubelet(made: Hosts, folder: Path, node: int, pod: Found, secret: Found, given: dict[str, str]) -> Command:
    """Start a pod's container as the kubelet does. Its error stream goes to a file, node-K.err."""
    (container,) = pod["containers"]
    env = dict(given)
    for one in container["env"]:
        reference = one["valueFrom"]["secretKeyRef"]
        assert reference["name"] == secret["metadata"]["name"]
        env[one["name"]] = secret["stringData"][reference["key"]]

    def expand(word: str) -> str:
        return re.sub(r"\$(\$|\((\w+)\))", lambda m: "$" if m[1] == "$" else env.get(m[2], m[0]), word)

    words = [expand(word) for word in container["command"]]
    assert words[0] == "evenstep"
    for mount in container["volumeMounts"]:
        assert Path(mount["mountPath"]).is_dir()  # the folder stands for the volume
    line = f'exec "$@" 2> node-{node}.err'
    return made.start(node + 1, "sh", "-c", line, "sh", *command(*words[1:]), folder=folder, env=env)


def has(file: Path, text: str) -> bool:
    return file.exists() and text in file.read_text()


TELLS = training(ends="if run.rank == 0: print(sys.argv[3:])")
ARGUMENTS = ("2", "0", "a b", "$(HOME)", "$x")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One process."""
    folder = tmp_path_factory.mktemp("alone")
    write_script(folder, TELLS)
    return evenstep(folder, "run", "script.py", *ARGUMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["job", "pytorchjob"])
def test_the_fingerprint_of_one_process(two: Hosts, tmp_path: Path, kind: str, alone: Result) -> None:
    write_script(tmp_path, TELLS)
    (tmp_path / "runs").mkdir()
    words = [
        "--nodes",
        2,
        "--processes",
        2,
        "--claim",
        "runs",
        "--run",
        tmp_path / "runs" / "one",
        "--master-port",
        2345,
    ]
    made = printed(tmp_path, *words, "script.py", *ARGUMENTS, kind=kind)
    address = "digits-0.digits" if kind == "job" else "digits-master-0"
    names = [Path(f"/etc/netns/{two.namespace(host)}/hosts") for host in (1, 2)]
    pods = []
    for node in (0, 1):
        if kind == "job":
            given = {"JOB_COMPLETION_INDEX": str(node)}
        else:  # as the operator sets it
            given = {"RANK": str(node), "WORLD_SIZE": "4", "MASTER_ADDR": address, "MASTER_PORT": "23456"}
            own = {"NNODES": "2", "NODE_RANK": str(node), "NPROC_PER_NODE": "2", "MASTER_ADDR": address}
            given |= {f"PET_{name}": value for name, value in {**own, "MASTER_PORT": "23456"}.items()}
        pods.append(kubelet(two, tmp_path, node, pod_of(made, kind), made["Secret"], given))
    # The name becomes known when the pods are there already, and both have said what they wait for.
    files = [tmp_path / f"node-{node}.err" for node in (0, 1)]
    for file, said in zip(files, (f"waiting for the name {address}", f"waiting for node 0 at {address}"), strict=True):
        assert eventually(partial(has, file, said)), said
    for file in names:
        file.write_text(f"{file.read_text()}{two.address(1)} {address}\n")  # in place: it is mounted
    first, second = (pod.wait() for pod in pods)
    errors = [file.read_text() for file in files]
    assert (first.code, second.code) == (0, 0), errors
    assert "4 processes" in errors[0]
    assert first.out == alone.out
    assert "['a b', '$(HOME)', '$x']" in first.out
    assert "fingerprint" in first.out
    assert (tmp_path / "runs" / "one" / "finished.json").exists()


@pytest.mark.slow
def test_a_name_that_never_comes_is_named(two: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, training())
    words = ["--nodes", 2, "--master-addr", "nobody-0.nobody", "--master-port", 2345, "--join-timeout", 2, "script.py"]
    commands = [
        two.start(node + 1, *command("run", "--node-rank", node, *words, 1, 0), folder=tmp_path) for node in (0, 1)
    ]
    for one, code in zip(commands, (2, 4), strict=True):
        result = one.wait()
        assert result.code == code, result
        assert "nobody-0.nobody" in result.err
        assert "resolution" in result.err or "not known" in result.err
    assert not (tmp_path / "runs").exists()
