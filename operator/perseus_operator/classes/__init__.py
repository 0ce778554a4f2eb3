"""EnergyClasses: PerseusJobs made for workloads that carry a label."""
