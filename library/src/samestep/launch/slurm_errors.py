"""Explain errors of Slurm's commands, and why its jobs wait or have failed: cause and remedy."""

import re
from collections.abc import Mapping

ERRORS = {  # pattern of an error of sbatch: cause and remedy; {0} is the first group
    r"[Ii]nvalid partition(?: specified)?:? ?(\S*)":
        "Slurm has no partition {0}: sinfo lists them; set cluster.partition",
    r"[Ii]nvalid account":
        "Slurm does not know this account, or you may not use it here: set cluster.account",
    r"[Ii]nvalid qos":
        "you may not use this QOS: change it in cluster.options",
    r"[Rr]equested time limit is invalid":
        "cluster.time is no time limit, or longer than the partition allows: lower it",
    r"[Mm]emory specification":
        "no node has that much memory: lower cluster.memory",
    r"[Nn]ode count specification invalid|More processors requested|[Nn]ode configuration is not":
        "the partition has no such nodes: ask for less by trainer.num_nodes, trainer.devices, "
        "cluster.cpus or cluster.memory, or choose another cluster.partition",
    r"generic resource|gres":
        "the nodes have no such GPUs: lower trainer.devices, change cluster.gpus, or say "
        "trainer.accelerator=cpu",
    r"contact slurm controller|[Cc]onnection refused|resolve|[Tt]imed out":
        "Slurm does not answer: try again in a minute, and look at scontrol ping",
    r"munge|[Aa]uthentication":
        "this machine may not talk to Slurm: its munge does not run, or has another key",
}  # fmt: skip
REASONS = {  # pattern of a job's Reason: cause and remedy
    r"^Resources$":
        "it waits until nodes are free",
    r"^Priority$":
        "it waits for jobs with a higher priority",
    r"^BeginTime$":
        "it is queued again, and starts in about two minutes",
    r"^PartitionTimeLimit$":
        "cluster.time is longer than the partition allows, so it never starts: cancel, lower it",
    r"^Partition(Node|Config)|^NodeConfig|^BadConstraints":
        "the partition has no such nodes, so it never starts: cancel, and ask for less",
    r"^Partition(Down|Inactive)|^ReqNodeNotAvail|^Nodes_required":
        "its nodes are down, reserved or in maintenance: it starts when they are back; see sinfo",
    r"^(InvalidAccount|InvalidQOS|.*NotAllowed)":
        "you may not use this account, QOS or partition ({0}): cancel, and change it",
    r"^((?:Assoc|QOS)\w+)":
        "a limit of your account or QOS is reached ({0}): it waits for your other jobs to end",
    r"^JobArrayTaskLimit":
        "as many trials run as may run at once",
    r"^JobHeld(?:User|Admin)|[Rr]equeued.held":
        "it is held: scontrol release starts it; a job is held when its start fails, for example "
        "on a broken node",
    r"^Dependency":
        "it waits for another job",
    r"^TimeLimit":
        "it did not stop within cluster.grace_s: the same submit continues it from its last save",
    r"^OutOfMemory":
        "it used more memory than cluster.memory: raise that",
    r"^NodeFail|^NodeDown":
        "a node was lost",
}  # fmt: skip
EXIT_CODES = {
    "2": "wrong configuration",
    "143": "stopped after saving; the same submit continues it",
}


def explain_error(stderr: str) -> str:
    """Explain an error of a command of Slurm; an unknown one by its own words."""
    return find_sentence(ERRORS, stderr) or stderr.strip() or "Slurm's command failed"


def explain(job: Mapping[str, str]) -> str:
    """Explain why a job waits or has failed; an unknown reason by Slurm's own word."""
    code, _, signum = job.get("ExitCode", "0:0").partition(":")
    if job["JobState"] == "FAILED" and signum == "0":
        return ": ".join(filter(None, [f"exit code {code}", EXIT_CODES.get(code, "")]))
    reason = job.get("Reason", "None")
    if reason == "None":
        return ""
    sentence = find_sentence(REASONS, reason)
    return f"{sentence} ({reason})" if sentence and reason not in sentence else sentence or reason


def find_sentence(sentences: Mapping[str, str], text: str) -> str:
    """The sentence of the first pattern that ``text`` contains; empty without one."""
    for pattern, sentence in sentences.items():
        if match := re.search(pattern, text):
            return sentence.format(*(group or "" for group in match.groups()))
    return ""
