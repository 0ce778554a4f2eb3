"""EnergyClasses: PerseusJobs and ServingPools made for workloads that carry a label."""
