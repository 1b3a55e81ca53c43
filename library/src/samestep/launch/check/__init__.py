"""Find mistakes before a cluster sees them: in the configuration, and in the manifests made of it.

Each mistake is one line that names the value, the rule and the remedy. The checks need no
cluster, no network and no torch. Read in this order:

- ``manifests``: which checks a configuration and its documents go through.
- ``cluster_rules``: the configuration; ``names``, ``images`` and ``quantities`` are its vocabulary.
- ``kubernetes_schemas``: fields and types that the API servers accept, from schemas.json.xz.
- ``pod_security``: the restricted Pod Security Standard, a JSON Schema in pod_security.yaml.
- ``api_rules``: what the API server and the operators demand beyond the schemas, by kind, in
  ``jobs``, ``pods``, ``network`` and ``operators``.
- ``controllers``: the objects that controllers make of ours; the same rules judge these.
- ``secrets``: passwords and tokens in plain text.
- ``documents``: how the other modules walk through a document.
"""

from samestep.launch.check.cluster_rules import check_examples, notes
from samestep.launch.check.kubernetes_schemas import schemas
from samestep.launch.check.manifests import faults, refuse

__all__ = ["check_examples", "faults", "notes", "refuse", "schemas"]
