"""Which pipelines are slow: as telemetry shows (``detector``), or as users declare (``annotation``, ``declared``)."""
