"""The objects that controllers make of ours, so that they can be checked before they are made.

Nobody reads an answer of the API server to a controller: a Job that it refuses shows only in
events. Sources: JobSet 0.12, Kubeflow Trainer 2.3, training operator 1.9, and the controller of
TorchElastic.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy

from samestep.launch.render import Document


def make_objects(documents: Sequence[Document]) -> Iterator[tuple[Document, Document]]:
    """Yield each document that a controller makes objects of, with each of these objects."""
    for document in documents:
        make = MAKERS.get(document["kind"])
        if make is not None:
            yield from ((document, made) for made in make(document))
        elif document["kind"] == "TrainJob":
            for jobset in make_jobset(document, documents):
                yield document, jobset
                yield from ((document, made) for made in make_jobset_objects(jobset))


def make_jobset_objects(jobset: Document) -> Iterator[Document]:
    """Yield the Service of a JobSet, and the last Job of each replicatedJob.

    The last one has the longest name; the others are the same otherwise.
    """
    metadata, spec = jobset["metadata"], jobset["spec"]
    subdomain = spec.get("network", {}).get("subdomain", metadata["name"])
    service = {
        "clusterIP": "None",
        "selector": {"jobset.sigs.k8s.io/jobset-name": metadata["name"]},
    }
    yield make_object("v1", "Service", subdomain, metadata, service)
    for replicated in spec.get("replicatedJobs", ()):
        job = deepcopy(replicated["template"]["spec"])
        job.setdefault("completionMode", "Indexed")
        job["template"]["spec"].setdefault("restartPolicy", "OnFailure")
        name = (
            f"{metadata['name']}-{replicated['name']}-{max(0, replicated.get('replicas', 1) - 1)}"
        )
        yield make_object("batch/v1", "Job", name, metadata, job)


def make_jobset(train_job: Document, documents: Sequence[Document]) -> Iterator[Document]:
    """Yield the JobSet of a TrainJob; none if its runtime is not among the documents."""
    reference, metadata = train_job["spec"]["runtimeRef"], train_job["metadata"]
    trainer = train_job["spec"].get("trainer", {})
    for runtime in documents:
        if runtime["kind"] != reference.get("kind"):
            continue
        if runtime["metadata"]["name"] != reference["name"]:
            continue
        spec = deepcopy(runtime["spec"]["template"]["spec"])
        nodes = trainer.get("numNodes", runtime["spec"].get("mlPolicy", {}).get("numNodes", 1))
        for replicated in spec["replicatedJobs"]:
            replicated["template"]["spec"] |= {"completions": nodes, "parallelism": nodes}
        yield make_object("jobset.x-k8s.io/v1alpha2", "JobSet", metadata["name"], metadata, spec)


def make_replicas(job: Document) -> Iterator[Document]:
    """Yield the last pod of each role of a PyTorchJob or an ElasticJob, and the pod's Service."""
    metadata, spec = job["metadata"], job["spec"]
    for role, replica in (spec.get("pytorchReplicaSpecs") or spec["replicaSpecs"]).items():
        name = f"{metadata['name']}-{role.lower()}-{replica.get('replicas', 1) - 1}"
        service = {"clusterIP": "None", "ports": [{"port": 29500}]}
        yield make_object("v1", "Service", name, metadata, service)
        pod = make_object("v1", "Pod", name, metadata, deepcopy(replica["template"]["spec"]))
        pod["metadata"]["labels"] = replica["template"].get("metadata", {}).get("labels", {})
        yield pod


def make_object(version: str, kind: str, name: str, owner: Document, spec: Document) -> Document:
    """An object with the labels and the namespace of its owner."""
    metadata = {key: owner[key] for key in ("namespace", "labels") if key in owner}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, **deepcopy(metadata)},
        "spec": spec,
    }


MAKERS = {
    "JobSet": make_jobset_objects,
    "PyTorchJob": make_replicas,
    "ElasticJob": make_replicas,
}
