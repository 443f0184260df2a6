"""The pod of the manifests as podman runs it, with an engine that stands in for vLLM's.

Everything that the pod's own mechanism needs stays as the manifests have it: containers, users, hardening, volumes,
environment, arguments. The engine's image has a name of its own, so no real image of vLLM is replaced. Three things are
changed because podman 4.3 cannot do them. It restarts the init containers of a Deployment without end, so the
Deployment becomes a Pod whose containers restart on failure. It does not decode the data of a Secret, so the secret is
a directory. It has no NetworkPolicy, Service or ServiceMonitor.

Law of this file: it reads the manifests and runs nothing.
"""

import copy
from pathlib import Path
from typing import Any, Final

import yaml

MANIFESTS: Final = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "vllm-with-console.yaml"
NAME: Final = "kvbm-test"
"""The pod's name, and the beginning of the names of its containers and volumes."""
STAND_IN_IMAGE: Final = "localhost/kvbm-test-engine:1"
STAND_IN: Final = (
    "--served-model-name=m", "--distributed-executor-backend=tests.vllm.executor.FakeExecutor", "--load-format=dummy",
    "--num-gpu-blocks-override=64", "--block-size=16", "--max-model-len=640", "--generation-config=vllm",
)
"""Settings of the engine beyond the manifests, for a made-up device and no weights."""


def deployment() -> dict[str, Any]:
    """The Deployment of the manifests."""
    documents = yaml.safe_load_all(MANIFESTS.read_text(encoding="utf-8"))
    found: dict[str, Any] = next(one for one in documents if one and one["kind"] == "Deployment")
    return found


def pod(mounts: dict[str, str], secret: str, ports: dict[str, int]) -> dict[str, Any]:
    """The pod with these directories in the engine, this one as its secret, and these ports of the host by name."""
    template = copy.deepcopy(deployment()["spec"]["template"])
    spec = template["spec"]
    spec["restartPolicy"] = "OnFailure"
    engine = next(one for one in spec["containers"] if one["name"] == "vllm")
    engine["image"] = STAND_IN_IMAGE
    engine["args"] = ["/engine/model", *engine["args"][1:], *STAND_IN]
    for inside, outside in mounts.items():
        name = inside.strip("/")
        engine["volumeMounts"].append({"name": name, "mountPath": inside, "readOnly": True})
        spec["volumes"].append({"name": name, "hostPath": {"path": outside, "type": "Directory"}})
    for volume in spec["volumes"]:
        if volume.pop("secret", None):
            volume["hostPath"] = {"path": secret, "type": "Directory"}
        volume["name"] = f"{NAME}-{volume['name']}"  # podman shares volumes of one name among all pods
    for container in (*spec["initContainers"], *spec["containers"]):
        for mount in container["volumeMounts"]:
            mount["name"] = f"{NAME}-{mount['name']}"
        for port in container.get("ports", ()):
            port |= {"hostPort": ports[port["name"]], "hostIP": "127.0.0.1"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": NAME}, "spec": spec}
