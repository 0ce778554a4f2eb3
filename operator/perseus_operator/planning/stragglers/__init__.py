"""Which pipelines are slow: as telemetry shows (``detector``), or as somebody declares (``annotation``)."""
