"""A launch as Kubernetes manifests: a pod a node, which find each other by name.

`job`: an indexed Job with a headless Service. `trainjob`, `pytorchjob`: for Kubeflow's operators, which say to each pod
where it stands in the environment (PET_NNODES, PET_NODE_RANK, ..., torchrun's names; `evenstep run` reads them).

With each come a Secret with the run's token and a NetworkPolicy that lets no one but the pods themselves in. A run that
ended because a pod was evicted, or a host was lost, is started again by the cluster, and goes on from its checkpoint
where the run directory outlives the pods. What would come again (a failed script, wrong usage) ends it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from evenstep.environment import TOKEN
from evenstep.errors import UsageError

Manifest = dict[str, Any]

KINDS = ("job", "trainjob", "pytorchjob")
_STARTS_AGAIN = 6  # times that the cluster starts a run again after a failure of hosts; Kubernetes' own default
_LONGEST_NAME = 40  # Kubernetes makes longer names of it, of 63 characters at most
_LARGEST_SCRIPT = 900_000  # bytes; a ConfigMap holds 1 MiB
_RUNS = PurePosixPath("/runs")
_SCRIPTS = PurePosixPath("/evenstep")
_SCRIPT_FAILED, _WRONG_USAGE = 1, 2  # exit codes of `evenstep run` that the same command has again
_STOPPED = [130, 138, 143]  # by SIGINT, SIGUSR1, SIGTERM: after a checkpoint


@dataclass(frozen=True)
class Asked:
    """What is to run in the cluster."""

    kind: str
    name: str
    image: str
    options: tuple[str, ...]  # of `evenstep run`, that say nothing of hosts, processes or the run directory
    script: str
    arguments: tuple[str, ...]
    nodes: int = 1
    processes: int | str = 1  # of each node
    gpus: int = 0  # of each node
    port: int = 29500
    namespace: str | None = None
    run: str | None = None  # the run directory: a path in the container, or a name
    claim: str | None = None  # the PersistentVolumeClaim that it lies on
    volumes: tuple[tuple[str, str], ...] = ()  # other claims and their places in the container
    text: str | None = None  # the script's, if it is not in the image
    token: str | None = None  # None: the Secret is there already
    secret: str | None = None  # its name, if it is not the run's
    grace: int = 120  # seconds from SIGTERM to SIGKILL, for a step and a checkpoint

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name) or len(self.name) > _LONGEST_NAME:
            raise UsageError(
                f"--name {self.name!r} is no name for Kubernetes: small letters, digits and dashes, the first a "
                f"letter, at most {_LONGEST_NAME} in all",
                do="give such a --name",
            )
        if self.text is not None and len(self.text.encode()) > _LARGEST_SCRIPT:
            raise UsageError(
                f"--mount-script: {self.script} has more than {_LARGEST_SCRIPT} bytes, the most that a ConfigMap takes",
                do="copy it into the image",
            )

    @property
    def directory(self) -> str:
        """The run directory in the containers."""
        return str(_RUNS / (self.run or self.name))

    @property
    def labels(self) -> dict[str, str]:
        """On all that belongs to the run."""
        return {"app.kubernetes.io/name": "evenstep", "app.kubernetes.io/instance": self.name}

    @property
    def everything(self) -> str:
        """kubectl's words for all that belongs to the run."""
        own = {"job": "job,service", "trainjob": "trainjob,trainingruntime", "pytorchjob": "pytorchjob"}[self.kind]
        namespace = f" --namespace {self.namespace}" if self.namespace else ""
        return f"{own},secret,networkpolicy,configmap -l app.kubernetes.io/instance={self.name}{namespace}"

    @property
    def node_0(self) -> dict[str, str]:
        """The labels of node 0's pod."""
        own = {"training.kubeflow.org/replica-type": "master"}
        return {
            "app.kubernetes.io/instance": self.name,
            **(own if self.kind == "pytorchjob" else {"batch.kubernetes.io/job-completion-index": "0"}),
        }

    @property
    def resource(self) -> str:
        """The whole run, for kubectl."""
        of = {"job": "job", "trainjob": "trainjob.trainer.kubeflow.org", "pytorchjob": "pytorchjob.kubeflow.org"}
        return f"{of[self.kind]}/{self.name}"


def manifests(asked: Asked) -> list[Manifest]:
    """What to create, in this order."""
    made = []
    if asked.token is not None:
        made.append(_manifest(asked, "v1", "Secret", type="Opaque", immutable=True, stringData={"token": asked.token}))
    if asked.text is not None:
        made.append(_manifest(asked, "v1", "ConfigMap", data={_script_file(asked): asked.text}))
    own = {"matchLabels": asked.labels}
    policy = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}
    made.append(_manifest(asked, "networking.k8s.io/v1", "NetworkPolicy", spec=policy))
    return made + {"job": _job, "trainjob": _train_job, "pytorchjob": _pytorch_job}[asked.kind](asked)


def to_yaml(made: list[Manifest]) -> str:
    """As kubectl reads them."""
    import yaml  # here: most commands need none

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    dumper.add_representer(str, _represent)
    return str(yaml.dump_all(made, Dumper=dumper, sort_keys=False, allow_unicode=True, width=120))


def _represent(dumper: Any, value: str) -> Any:
    """Lines as lines."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


def _job(asked: Asked) -> list[Manifest]:
    made = []
    place: list[str] = []
    if asked.nodes > 1:
        address = f"{asked.name}-0.{asked.name}"
        place = ["--nodes", str(asked.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
        place += ["--master-addr", address, "--master-port", str(asked.port)]
        # Names are known before pods are ready, since that is what they wait for.
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": asked.labels}
        service["ports"] = [{"name": "launchers", "port": asked.port}]
        made.append(_manifest(asked, "v1", "Service", spec=service))
    spec = {
        "completionMode": "Indexed",
        "completions": asked.nodes,
        "parallelism": asked.nodes,
        "backoffLimit": _starts_again(asked) * asked.nodes,  # a failure of a run is one of each of its pods
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": _failure_policy("train"),
        "template": {
            "metadata": {"labels": asked.labels},
            "spec": _pod(asked, "train", place) | {"restartPolicy": "Never", "subdomain": asked.name},
        },
    }
    return [*made, _manifest(asked, "batch/v1", "Job", spec=spec)]


def _train_job(asked: Asked) -> list[Manifest]:
    """A TrainJob (trainer.kubeflow.org/v1alpha1) with a runtime of its own, since volumes are the runtime's."""
    job = {
        "backoffLimit": 0,  # the JobSet starts all pods again
        "podFailurePolicy": _failure_policy("node"),
        "template": {
            "metadata": {"labels": asked.labels},
            "spec": _pod(asked, "node", []) | {"restartPolicy": "Never"},
        },
    }
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    rule = {"name": "comesAgain", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    runtime = {
        "mlPolicy": {"numNodes": asked.nodes, "torch": {}},
        "template": {
            "spec": {
                "failurePolicy": {"maxRestarts": _starts_again(asked), "rules": [rule]},
                "replicatedJobs": [{"name": "node", "template": {"metadata": {"labels": step}, "spec": job}}],
            }
        },
    }
    trainer: Manifest = {"numNodes": asked.nodes}
    if isinstance(asked.processes, int):
        trainer["numProcPerNode"] = asked.processes
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": asked.name}
    version = "trainer.kubeflow.org/v1alpha1"
    return [
        _manifest(asked, version, "TrainingRuntime", spec=runtime),
        _manifest(asked, version, "TrainJob", spec={"runtimeRef": reference, "trainer": trainer}),
    ]


def _pytorch_job(asked: Asked) -> list[Manifest]:
    """A PyTorchJob (kubeflow.org/v1). Its operator knows no exit codes below 128 that should start a pod again."""
    template = {"metadata": {"labels": asked.labels}, "spec": _pod(asked, "pytorch", [])}
    policy = "OnFailure" if _starts_again(asked) else "Never"
    replicas = {"Master": 1, "Worker": asked.nodes - 1}
    spec = {
        "nprocPerNode": str(asked.processes),
        "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": _starts_again(asked) * asked.nodes},
        "pytorchReplicaSpecs": {
            kind: {"replicas": count, "restartPolicy": policy, "template": template}
            for kind, count in replicas.items()
            if count
        },
    }
    return [_manifest(asked, "kubeflow.org/v1", "PyTorchJob", spec=spec)]


def _manifest(asked: Asked, version: str, kind: str, **rest: object) -> Manifest:
    metadata: Manifest = {"name": asked.name, "labels": asked.labels}
    if asked.namespace:
        metadata["namespace"] = asked.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _pod(asked: Asked, container: str, place: list[str]) -> Manifest:
    """What a node runs; `place` says where it stands, if its environment does not."""
    script = str(_SCRIPTS / _script_file(asked)) if asked.text is not None else asked.script
    own = ["--processes", str(asked.processes), "--run", asked.directory, *asked.options, script, *asked.arguments]
    command = ["evenstep", "run", *place, *map(_literally, own)]
    mounts, volumes = _volumes(asked)
    token = {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": asked.secret or asked.name, "key": "token"}}}
    box: Manifest = {"name": container, "image": asked.image, "command": command, "env": [token]}
    if asked.gpus:
        box["resources"] = {"limits": {"nvidia.com/gpu": asked.gpus}}
    return {
        "terminationGracePeriodSeconds": asked.grace,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a service called "master" would set MASTER_PORT
        "containers": [box | {"volumeMounts": mounts}],
        "volumes": volumes,
    }


def _volumes(asked: Asked) -> tuple[list[Manifest], list[Manifest]]:
    """Where they are mounted, and what they are."""
    places = {"runs": str(PurePosixPath(asked.directory).parent), "shared-memory": "/dev/shm"}
    kinds: dict[str, Manifest] = {
        "runs": {"persistentVolumeClaim": {"claimName": asked.claim}} if asked.claim else {"emptyDir": {}},
        "shared-memory": {"emptyDir": {"medium": "Memory"}},  # loader processes need more than the usual 64 MiB
    }
    if asked.text is not None:
        places["script"], kinds["script"] = str(_SCRIPTS), {"configMap": {"name": asked.name}}
    for number, (claim, path) in enumerate(asked.volumes):
        places[f"volume-{number}"] = path
        kinds[f"volume-{number}"] = {"persistentVolumeClaim": {"claimName": claim}}
    mounts = [{"name": name, "mountPath": path} for name, path in places.items()]
    return mounts, [{"name": name, **kind} for name, kind in kinds.items()]


def _failure_policy(container: str) -> Manifest:
    def codes(action: str, values: list[int]) -> Manifest:
        return {
            "action": action,
            "onExitCodes": {"containerName": container, "operator": "In", "values": values},
        }

    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"rules": [evicted, codes("FailJob", [_SCRIPT_FAILED, _WRONG_USAGE]), codes("Ignore", _STOPPED)]}


def _starts_again(asked: Asked) -> int:
    """How often. A run whose checkpoints have gone with its pods would begin anew."""
    return _STARTS_AGAIN if asked.claim else 0


def _script_file(asked: Asked) -> str:
    return PurePosixPath(asked.script).name


def _literally(word: str) -> str:
    """Kubernetes replaces $(NAME) in commands, and takes $$ for $."""
    return word.replace("$", "$$")
