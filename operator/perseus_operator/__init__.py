"""The operator: it watches PerseusJobs, has their frontiers solved, and commands the agents of their nodes.

    kopf ──► handlers ──► controller.operator ──► controller.job_runner (one for each PerseusJob)
                                                      │ state ──► planning.planner.decide ──► Decision
                                                      ├──► controller.node_session ──► clients.agents ──gRPC──► agents
                                                      ├──► controller.frontier_loader ──► solving (worker processes)
                                                      └──► reporting ──► controller.status_writer ──► clients.kube

Everything that is decided is decided in ``planning``, which does no I/O. What users write and read is typed in ``api``.
"""
