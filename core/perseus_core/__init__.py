"""The vocabulary: what two rooms or more speak of is declared here, once, with its unit.

Nothing flows through this room. It holds the types of values that pass between the others:

    units           one type for each quantity that travels, and the only conversions between them
    rank            which process of a job: data-parallel rank, stage, tensor-parallel rank
    instruction     what such a process executes
    marks           whose time marks are in, and how an agent chose the moments of clock changes
    grain           how finely a plan sets clocks
    leases          the clock that a lease asks for, and what an agent answers of each GPU
    latency         how long a GPU takes to change its clock: its distribution, or what is published for its model
    clock_latency   what a GPU has measured of it, by the clocks that it changed between
    iteration       what a rank did in one iteration, as it is reported
    evidence        how clocks followed the plan in it
    hardware        what a plan meets on GPUs: these latencies, marks and scatter; its JSON
    gpus            how time and power of a GPU model follow its clock
    serving         what an engine says, and the table of clocks that it follows
    keys            names that are met in the cluster: labels, annotations, environment, ports

Training code and engines import it, too, so it needs the standard library alone. It imports no other room. Begin with
``units`` and ``rank``: nearly every other module of the project uses them.
"""
