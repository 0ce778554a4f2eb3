"""An embedded Kubernetes API server for machines without a cluster: ``python -m perseus_sim.apiserver --kubeconfig
PATH``.

What serves and what does not from kmock, on which it is built:

* kept: the catalogue of built-in resources, the server core, and the reaction language, with which a test injects
  faults (``server["get /api/v1/pods"] << 503``); reactions win over the store;
* replaced: the emulator's storage (dictionaries merged without uid, revision, generation or status subresource), its
  paths (namespaces cannot be addressed) and its discovery.

It keeps state in memory and enforces what clients rely on: optimistic concurrency, generation, status subresource,
CRD schemas with defaults and pruning, finalizers, owner references, watches from a revision, and Kubernetes' error
bodies.

Not done here, and done by a real API server: CEL rules (``x-kubernetes-validations`` are accepted and not evaluated),
authentication and RBAC, admission webhooks, schemas of built-in kinds, controllers other than garbage collection,
conflicts between field managers, protobuf bodies (``kubectl create configmap`` sends them; ``kubectl apply`` does
not). Nothing listens but loopback.
"""
