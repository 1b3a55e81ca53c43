"""The *restricted* Pod Security Standard of Kubernetes, as of 1.36: one row for each control.

Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

CONTAINERS = ("containers", "initContainers", "ephemeralContainers")
CAPABILITY = "NET_BIND_SERVICE"
SELINUX = ("container_t", "container_init_t", "container_kvm_t", "container_engine_t")
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}
SYSCTLS = (
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
)


class Control(NamedTuple):
    """What a field of a pod must be.

    ``fields``: paths from ``spec``. ``*.`` stands for each container; with ``^.`` instead a field
    that is unset there has the value of the pod. ``[]`` stands for each item.
    """

    name: str
    fields: str
    holds: Callable[[Any], bool]
    must: str


def unset_or(*values: Any) -> Callable[[Any], bool]:
    """Whether the value is one of these or not there."""
    return lambda value: value in (None, *values)


HOSTS = " ".join(
    [f"*.{probe}Probe.{way}.host" for probe in ("liveness", "readiness", "startup")
     for way in ("httpGet", "tcpSocket")]
    + [f"*.lifecycle.{hook}.{way}.host" for hook in ("postStart", "preStop")
       for way in ("httpGet", "tcpSocket")]
)  # fmt: skip
S = "securityContext"
BASELINE = (
    Control("HostProcess", f"{S}.windowsOptions.hostProcess *.{S}.windowsOptions.hostProcess",
            unset_or(False), "false"),
    Control("Host Namespaces", "hostNetwork hostPID hostIPC", unset_or(False), "false"),
    Control("Privileged Containers", f"*.{S}.privileged", unset_or(False), "false"),
    Control("HostPath Volumes", "volumes[].hostPath", unset_or(), "left out"),
    Control("Host Ports", "*.ports[].hostPort", unset_or(0), "left out"),
    Control("Host Probes / Lifecycle Hooks", HOSTS, unset_or(""), "left out"),
    Control("AppArmor", f"{S}.appArmorProfile.type *.{S}.appArmorProfile.type",
            unset_or("RuntimeDefault", "Localhost"), "RuntimeDefault or Localhost"),
    Control("SELinux", f"{S}.seLinuxOptions.type *.{S}.seLinuxOptions.type",
            unset_or("", *SELINUX), f"one of {', '.join(SELINUX)}"),
    Control("SELinux", f"{S}.seLinuxOptions.user {S}.seLinuxOptions.role "
            f"*.{S}.seLinuxOptions.user *.{S}.seLinuxOptions.role", unset_or(""), "left out"),
    Control("/proc Mount Type", f"*.{S}.procMount", unset_or("Default"), "Default"),
    Control("Sysctls", f"{S}.sysctls[].name", unset_or(*SYSCTLS), f"one of {', '.join(SYSCTLS)}"),
)  # fmt: skip
RESTRICTED = (  # these also hold what the baseline says of the same fields
    Control("Volume Types", "volumes[]", lambda v: v.keys() - {"name"} <= VOLUMES,
            f"one of {', '.join(sorted(VOLUMES))}"),
    Control("Privilege Escalation", f"*.{S}.allowPrivilegeEscalation", lambda v: v is False,
            "false"),
    Control("Running as Non-root", f"^.{S}.runAsNonRoot", lambda v: v is True, "true"),
    Control("Running as Non-root user", f"{S}.runAsUser *.{S}.runAsUser", lambda v: v != 0,
            "above 0"),
    Control("Seccomp", f"^.{S}.seccompProfile.type",
            lambda v: v in ("RuntimeDefault", "Localhost"), "RuntimeDefault or Localhost"),
    Control("Capabilities", f"*.{S}.capabilities.drop", lambda v: "ALL" in (v or ()),
            "a list with ALL"),
    Control("Capabilities", f"*.{S}.capabilities.add[]", unset_or(CAPABILITY), CAPABILITY),
)  # fmt: skip


def faults(pod: dict[str, Any], path: str) -> Iterator[str]:
    """Where a pod or a template of one breaks the standard.

    Args:
        pod: has ``metadata`` and ``spec``.
        path: where it is, such as ``spec.template``; empty for a Pod.
    """
    prefix = f"{path}." if path else ""
    for control in (*BASELINE, *RESTRICTED):
        for field in control.fields.split():
            for place, value in values(pod["spec"], field):
                if not control.holds(value):
                    shown = "" if value is None or isinstance(value, (dict, list)) else f"={value}"
                    yield (
                        f"{prefix}spec.{place}{shown}: must be {control.must} "
                        f"(Pod Security Standard, {control.name})"
                    )
    for name, value in pod.get("metadata", {}).get("annotations", {}).items():
        if name.startswith(APPARMOR) and not value.startswith(("runtime/default", "localhost/")):
            yield (
                f"{prefix}metadata.annotations[{name}]={value}: must be runtime/default "
                "(Pod Security Standard, AppArmor)"
            )


def values(spec: dict[str, Any], field: str) -> Iterator[tuple[str, Any]]:
    """Each place that ``field`` stands for, and its value, None where there is none."""
    kind, _, rest = field.partition(".")
    if kind not in ("*", "^"):
        yield from _below(spec, field)
        return
    for group in CONTAINERS:
        for number, container in enumerate(spec.get(group, ())):
            for place, value in _below(container, rest):
                if kind == "^" and value is None:
                    (_, value), *_ = _below(spec, rest)
                yield f"{group}[{number}].{place}", value


def _below(node: Any, field: str, place: str = "") -> Iterator[tuple[str, Any]]:
    key, _, rest = field.partition(".")
    name = key.removesuffix("[]")
    value = node.get(name) if isinstance(node, dict) else None
    place = f"{place}.{name}" if place else name
    places = [(place, value)]
    if key.endswith("[]"):
        places = [(f"{place}[{number}]", item) for number, item in enumerate(value or ())]
    for where, item in places:
        yield from _below(item, rest, where) if rest else [(where, item)]
