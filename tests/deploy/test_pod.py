"""The pod that ``make images`` runs is the pod of the manifests, but for what podman cannot do.

Law of this file: nothing is run.
"""

from typing import Any

from tests.deploy.pod import NAME, STAND_IN, deployment, pod

PORTS = {"http": 1, "metrics": 2}


def containers(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in (*spec["initContainers"], *spec["containers"])}


def test_every_container_keeps_what_the_manifests_say() -> None:
    made, meant = pod({"/python": "/opt/python"}, "/secret", PORTS)["spec"], deployment()["spec"]["template"]["spec"]
    assert made["securityContext"] == meant["securityContext"]
    assert containers(made).keys() == containers(meant).keys()
    for name, container in containers(made).items():
        original = containers(meant)[name]
        same = container.keys() - {"volumeMounts", "ports", "args"} - ({"image"} if name == "vllm" else set())
        assert {key: container[key] for key in same} == {key: original[key] for key in same}
        mounts = [{**mount, "name": mount["name"].removeprefix(f"{NAME}-")} for mount in container["volumeMounts"]]
        assert mounts[: len(original["volumeMounts"])] == original["volumeMounts"]
        if name == "vllm":
            assert container["args"] == ["/engine/model", *original["args"][1:], *STAND_IN]
        else:
            assert container.get("args") == original.get("args")


def test_volumes_have_names_of_their_own_and_each_mount_has_its_volume() -> None:
    spec = pod({"/python": "/opt/python"}, "/secret", PORTS)["spec"]
    names = {volume["name"] for volume in spec["volumes"]}
    assert all(name.startswith(f"{NAME}-") for name in names)
    assert {mount["name"] for one in containers(spec).values() for mount in one["volumeMounts"]} == names
    meant = {volume["name"]: volume for volume in deployment()["spec"]["template"]["spec"]["volumes"]}
    kept = {volume["name"].removeprefix(f"{NAME}-"): volume for volume in spec["volumes"]}
    assert kept.keys() == meant.keys() | {"python"}
    for name in meant.keys() - {"secret"}:
        assert {**kept[name], "name": name} == meant[name]


def test_a_pod_made_again_is_the_same() -> None:
    assert pod({}, "/secret", PORTS) == pod({}, "/secret", PORTS)
