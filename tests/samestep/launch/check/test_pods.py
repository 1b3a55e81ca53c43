"""Mistakes in pods that the API server finds by code, not by a schema."""

import pytest

from tests.samestep.launch.check.planting import CONTAINER, POD, refused

PLANTED = [
    (f"{POD}.containers[1]", {"name": "trainer"}, ".containers: two have the name trainer"),
    (f"{POD}.containers[1]", {"name": "A_b"}, "the name A_b must be at most 63 of a-z"),
    (f"{POD}.volumes[3]", {"name": "shm"}, ".volumes: two have the name shm"),
    (f"{CONTAINER}.volumeMounts[0].name", "shn", "the pod has no volume shn; it has shm, tmp, pro"),
    (f"{CONTAINER}.volumeMounts[1].mountPath", "/dev/shm", "volumeMounts: two are at /dev/shm"),
    (f"{CONTAINER}.volumeMounts[2].subPath", "/runs", "subPath=/runs must be a path below the vol"),
    (f"{CONTAINER}.volumeMounts[2].subPath", "a/../b", "subPath=a/../b must be a path below"),
    (f"{POD}.volumes[2].persistentVolumeClaim.claimName", "My Data", "claimName=My Data: must be"),
    (f"{POD}.priorityClassName", "High", "spec.priorityClassName=High: must be at most 253 of a-z"),
    (f"{POD}.imagePullSecrets", [{"name": "a_b"}], "imagePullSecrets[0].name=a_b: must be at most"),
    (f"{CONTAINER}.envFrom[0].secretRef.name", "my_keys", "secretRef.name=my_keys: must be at mo"),
    (f"{POD}.subdomain", "a.b", "spec.subdomain=a.b: must be at most 63 of a-z"),
    (f"{POD}.terminationGracePeriodSeconds", -1, "terminationGracePeriodSeconds=-1: must be at le"),
    (f"{POD}.securityContext.runAsUser", 2**31, "runAsUser=2147483648: must be from 0 to 21474836"),
    (f"{POD}.tolerations", [{"value": "x"}], "tolerations[0].key: is missing; only operator: Exi"),
    (f"{POD}.tolerations", [{"key": "a b"}], "tolerations[0].key=a b: is not the key of a taint"),
    (f"{POD}.tolerations", [{"key": "a", "operator": "Exists", "value": "x"}],
     "tolerations[0].value=x: must be left out with operator: Exists"),
    (f"{POD}.tolerations", [{"key": "a", "value": "x y"}], "value=x y: is not the value of a tai"),
    (f"{POD}.tolerations", [{"key": "a", "tolerationSeconds": 5}], "needs effect: NoExecute"),
    (f"{CONTAINER}.env[1]", {"name": "1A"}, "env[1].name=1A: must be of A-Z a-z 0-9 _ - ."),
    (f"{CONTAINER}.env[1]", {"name": "A", "value": "1", "valueFrom": {}}, "a value or valueFrom"),
    (f"{CONTAINER}.ports[0].containerPort", 65_536, "containerPort=65536: must be from 1 to 65535"),
    (f"{CONTAINER}.ports[0].name", "rendezvous-of-all", "must be at most 15 of a-z 0-9 -"),
    (f"{CONTAINER}.ports[1]", {"name": "rendezvous", "containerPort": 1}, "two have the name rend"),
    (f"{CONTAINER}.resources.requests.memory", "17Gi", "memory]=17Gi: must be at most its limit"),
    (f"{CONTAINER}.resources.limits.[nvidia.com/gpu]", "500m", "=500m: must be a whole number"),
    (f"{CONTAINER}.resources.requests.[nvidia.com/gpu]", 1, "gpu]=1: must be its limit 2"),
    (f"{CONTAINER}.resources.requests.[amd.com/gpu]", 1, "gpu]=1: needs the same limit"),
    (f"{CONTAINER}.resources.requests.cpu", -1, "requests[cpu]=-1: must be at least 0"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "message"), PLANTED)
def test_a_mistake_in_a_pod_is_found(place, value, message):
    (fault,) = refused(**{f"Job:{place}": value})
    assert message in fault


def test_what_a_server_accepts_is_no_mistake():
    tolerations = [
        {"operator": "Exists"},
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "spot", "value": "yes", "effect": "NoExecute", "tolerationSeconds": 60},
    ]
    assert (
        refused(
            **{
                f"Job:{POD}.tolerations": tolerations,
                f"Job:{POD}.priorityClassName": "system-cluster-critical",
                f"Job:{CONTAINER}.resources.requests.[nvidia.com/gpu]": 2,
                f"Job:{CONTAINER}.env[1]": {"name": "A.b-c_1", "value": ""},
            }
        )
        == []
    )
