"""The wire: what passes between our programs, and how it is encoded.

Three ways lead to an agent:

    operator ◄──gRPC──────────────► agent        ``v1alpha1/agent.proto``: leases, plan sets, selections; telemetry back
    trainer  ──Unix socket────────► agent        ``hello``: rank and schedule, once, and one answer with the memory
    trainer  ──shared memory──────► agent        ``channel``: marks, each a store; ``channel_layout`` says where

The clocks of plans are packed by ``planset``, one codec for both sides. The other services of ``v1alpha1`` are the
operator's: ``operator.proto`` for programs that know of a straggler, ``peer.proto`` between its replicas,
``solver.proto`` for workers that solve. ``podresources``, ``deviceplugin``, ``registration`` and ``dra`` are the
kubelet's, as Kubernetes defines them; ``device_plugin`` offers a resource to it.

Everything that a foreign process can write is bounded before it is decoded, in ``hello``, ``channel`` and ``planset``.
Apart from ``planset``, ``device_plugin`` and the generated stubs, modules need the standard library alone: training
images pin their own protobuf. Stubs are never edited by hand (``make generate``). It imports ``perseus_core`` and no
other room.

Begin with ``v1alpha1/agent.proto``, whose comments are the contract between operator and agent.
"""
