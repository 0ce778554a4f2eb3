"""The operator: it watches PerseusJobs and ServingPools, decides which clocks their GPUs shall have, commands agents.

A change in the cluster takes this way:

    API server ──kopf──► servers.handlers ──► controller.operator ──► controller.job_runner (one for each of them)
                                                                        │ observe ──► jobs.job.Job, and the job's Family
        agents ◄──gRPC── clients.agents ◄── controller.node_session ◄── │ decide  ──► Intent, actions
    API server ◄──────── clients.kube ◄──── controller.status_writer ◄─ │ report  ──► conditions, figures, events

1. ``handlers`` passes PerseusJobs, ServingPools, pods, PowerBudgets and EnergyClasses on. Which of them this replica
   serves, ``replicas`` decides.
2. A runner is a task that sleeps until something happens to its job. It gives what it observes to ``Job``, which every
   job has, and to the job's family: a kind of work whose clocks are set. ``families.registry`` chooses it by the spec.
3. ``Family.decide`` answers with what the agents shall hold, and with actions of the family's own. What decides is a
   pure function of what is known.
4. ``nodes.actions`` compares that with what each agent holds, and finds the next command for each node. What an agent
   answers and reports is an event of its ``Node`` and of the family.
5. Each command, and each action such as a solve (``solving``, in a process of its own), is a task that waits for
   nothing else. It ends with an event, which wakes the runner.

Once a second ``budgets`` asks each family what a watt is worth to its job and grants shares, and ``classes`` makes the
PerseusJobs and ServingPools that labels ask for. ``plugin`` is ``kubectl perseus``; it shares code with the operator
and talks to the API server alone. What users write and read is typed in ``api``.

Begin with ``jobs.family``, the protocol of families; then ``families.fixed_clock``, the smallest,
``families.training.decide``, the largest, whose features are folders, and ``families.serving``, whose plan is a table.
"""
