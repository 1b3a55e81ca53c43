"""The restricted Pod Security Standard: each control is broken, one by one."""

import pytest

from samestep.launch import check, rules, security
from tests.samestep.launch.test_check import TARGETS, C, S, composed, found

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
    faults = found(**{f"Job:{S}.{field}": value})
    assert any(f"(Pod Security Standard, {control})" in fault for fault in faults), faults


def test_the_table_has_all_controls_and_each_is_tried():
    controls = {control.name for control in (*security.BASELINE, *security.RESTRICTED)}
    assert controls == SECURITY.keys()
    assert len(controls) == 16  # of 13 and 5 on the page, two there are stricter forms of others


def test_the_annotation_that_switches_apparmor_off():
    cfg, documents = composed()
    annotations = documents[-1]["spec"]["template"]["metadata"]["annotations"]
    annotations["container.apparmor.security.beta.kubernetes.io/trainer"] = "unconfined"
    assert "(Pod Security Standard, AppArmor)" in "".join(check.faults(cfg, documents))


@pytest.mark.parametrize("group", ["initContainers", "ephemeralContainers"])
def test_other_containers_are_under_the_same_standard(group):
    container = {"name": "x", "image": "x:1"}
    faults = found(**{f"Job:{S}.{group}": [container]})
    assert f"{group}[0].securityContext.allowPrivilegeEscalation: must be false" in "".join(faults)


def test_a_container_may_say_what_its_pod_does_not():
    cfg, documents = composed()
    template = documents[-1]["spec"]["template"]
    own = template["spec"]["containers"][0]["securityContext"]
    context = template["spec"].pop("securityContext")
    own["seccompProfile"] = context["seccompProfile"]
    assert list(check.faults(cfg, documents)) == [
        f"Job mine: {C}.securityContext.runAsNonRoot: must be true "
        "(Pod Security Standard, Running as Non-root)"
    ]
    own["runAsNonRoot"] = True
    assert list(check.faults(cfg, documents)) == []


@pytest.mark.parametrize("target", TARGETS)
def test_the_standard_holds_for_the_pods_of_every_target(target):
    cfg, documents = composed(target)
    for document in documents:
        for _, pod in rules.pods(document):
            del pod["spec"]["securityContext"]
    kinds = {fault.split()[0] for fault in check.faults(cfg, documents)}
    expected = {document["kind"] for document in documents if list(rules.pods(document))}
    assert kinds == expected != set()
