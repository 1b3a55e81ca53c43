"""The restricted Pod Security Standard: each control is broken, one by one."""

import pytest

from samestep.launch import check
from samestep.launch.check.documents import find_pods, walk
from samestep.launch.check.pod_security import load_validator
from tests.samestep.launch.check.planting import CONTAINER, POD, TARGETS, composed, found

SECURITY = {  # control of the standard: fields and values that break it
    "HostProcess": [("securityContext.windowsOptions.hostProcess", True),
                    ("containers[0].securityContext.windowsOptions.hostProcess", True)],
    "Host Namespaces": [("hostNetwork", True), ("hostPID", True), ("hostIPC", True)],
    "Privileged Containers": [("containers[0].securityContext.privileged", True)],
    "HostPath Volumes": [("volumes[0]", {"name": "shm", "hostPath": {"path": "/"}})],
    "Host Ports": [("containers[0].ports[0].hostPort", 80)],
    "Host Probes / Lifecycle Hooks": [
        ("containers[0].livenessProbe", {"httpGet": {"host": "x", "port": 1}}),
        ("containers[0].readinessProbe", {"tcpSocket": {"host": "x", "port": 1}}),
        ("containers[0].startupProbe", {"httpGet": {"host": "x", "port": 1}}),
        ("containers[0].lifecycle", {"preStop": {"httpGet": {"host": "x", "port": 1}}}),
        ("containers[0].lifecycle", {"postStart": {"tcpSocket": {"host": "x", "port": 1}}})],
    "AppArmor": [("securityContext.appArmorProfile", {"type": "Unconfined"}),
                 ("containers[0].securityContext.appArmorProfile", {"type": "Unconfined"})],
    "SELinux": [("securityContext.seLinuxOptions", {"type": "spc_t"}),
                ("containers[0].securityContext.seLinuxOptions", {"user": "root"}),
                ("securityContext.seLinuxOptions", {"role": "admin"})],
    "/proc Mount Type": [("containers[0].securityContext.procMount", "Unmasked")],
    "Sysctls": [("securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}])],
    "Volume Types": [("volumes[0]", {"name": "shm", "nfs": {"server": "x", "path": "/"}})],
    "Privilege Escalation": [("containers[0].securityContext.allowPrivilegeEscalation", True),
                             ("containers[0].securityContext.allowPrivilegeEscalation", None)],
    "Running as Non-root": [("securityContext.runAsNonRoot", None),
                            ("containers[0].securityContext.runAsNonRoot", False)],
    "Running as Non-root user": [("securityContext.runAsUser", 0),
                                 ("containers[0].securityContext.runAsUser", 0)],
    "Seccomp": [("securityContext.seccompProfile", None),
                ("securityContext.seccompProfile.type", "Unconfined"),
                ("containers[0].securityContext.seccompProfile", {"type": "Unconfined"})],
    "Capabilities": [("containers[0].securityContext.capabilities.add", ["SYS_ADMIN"]),
                     ("containers[0].securityContext.capabilities.drop", ["KILL"]),
                     ("containers[0].securityContext.capabilities", None)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("control", "field", "value"),
    [(control, *case) for control, cases in SECURITY.items() for case in cases],
)
def test_each_control_of_the_restricted_standard(control, field, value):
    faults = found(**{f"Job:{POD}.{field}": value})
    assert any(f"(Pod Security Standard, {control})" in fault for fault in faults), faults


def test_the_schema_has_all_controls_and_each_is_tried():
    schemas = [node for _, node in walk(load_validator().schema) if isinstance(node, dict)]
    controls = {node["title"] for node in schemas if isinstance(node.get("title"), str)}
    assert controls == SECURITY.keys()
    assert len(controls) == 16  # of 13 and 5 on the page, two there are stricter forms of others


def test_each_rule_of_the_schema_has_a_title_and_a_description():
    """The messages are made of both."""
    rules = {"const", "enum", "not", "contains", "minimum", "pattern"}
    for path, node in walk(load_validator().schema):
        is_rule = isinstance(node, dict) and rules & node.keys()
        if is_rule and not path.endswith(".contains"):
            assert {"title", "description"} <= node.keys(), path


def test_a_message_names_place_value_rule_and_control():
    assert found(**{f"Job:{POD}.hostNetwork": True}) == [
        f"Job mine: {POD}.hostNetwork=true: must be false (Pod Security Standard, Host Namespaces)"
    ]
    assert found(**{f"Job:{CONTAINER}.securityContext.capabilities.drop": ["KILL"]}) == [
        f'Job mine: {CONTAINER}.securityContext.capabilities.drop=["KILL"]: must have ALL '
        "(Pod Security Standard, Capabilities)"
    ]
    (fault,) = found(**{f"Job:{CONTAINER}.securityContext.allowPrivilegeEscalation": None})
    assert f"{CONTAINER}.securityContext.allowPrivilegeEscalation: must be false" in fault


def test_the_annotation_that_switches_apparmor_off():
    cfg, documents = composed()
    annotations = documents[-1]["spec"]["template"]["metadata"]["annotations"]
    annotations["container.apparmor.security.beta.kubernetes.io/trainer"] = "unconfined"
    assert "(Pod Security Standard, AppArmor)" in "".join(check.faults(cfg, documents))


@pytest.mark.parametrize("group", ["initContainers", "ephemeralContainers"])
def test_other_containers_are_under_the_same_standard(group):
    container = {"name": "x", "image": "x:1"}
    faults = found(**{f"Job:{POD}.{group}": [container]})
    assert f"{group}[0].securityContext.allowPrivilegeEscalation: must be false" in "".join(faults)


def test_a_container_may_say_what_its_pod_does_not():
    cfg, documents = composed()
    template = documents[-1]["spec"]["template"]
    own = template["spec"]["containers"][0]["securityContext"]
    context = template["spec"].pop("securityContext")
    own["seccompProfile"] = context["seccompProfile"]
    assert list(check.faults(cfg, documents)) == [
        f"Job mine: {CONTAINER}.securityContext.runAsNonRoot: must be true "
        "(Pod Security Standard, Running as Non-root)"
    ]
    own["runAsNonRoot"] = True
    assert list(check.faults(cfg, documents)) == []


def test_a_pod_may_not_say_what_its_containers_correct():
    """The standard judges the pod's own value too."""
    cfg, documents = composed()
    template = documents[-1]["spec"]["template"]
    template["spec"]["securityContext"]["runAsNonRoot"] = False
    template["spec"]["containers"][0]["securityContext"]["runAsNonRoot"] = True
    assert list(check.faults(cfg, documents)) == [
        f"Job mine: {POD}.securityContext.runAsNonRoot=false: must be true "
        "(Pod Security Standard, Running as Non-root)"
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_the_standard_holds_for_the_pods_of_every_target(target):
    cfg, documents = composed(target)
    for document in documents:
        for _, pod in find_pods(document):
            del pod["spec"]["securityContext"]
    kinds = {fault.split()[0] for fault in check.faults(cfg, documents)}
    expected = {document["kind"] for document in documents if list(find_pods(document))}
    assert kinds == expected != set()
